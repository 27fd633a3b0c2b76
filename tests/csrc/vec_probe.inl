// Plain functions around the vector wrapper of one instruction set, for test_vec.cpp. Included like a kernel, inside a
// target region and a namespace.
#include "../../csrc/kernels/vec.inl"
#include "../../csrc/kernels/vec_math.inl"
#include "../../csrc/kernels/vec_dot.inl"
#include "../../csrc/kernels/vec_bytes.inl"

template <class From, class To>
static void convert(const From* x, To* y, int count) {
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) store(y + i, load(x + i));
    if (i < count) store_partial(y + i, load_partial(x + i, count - i), count - i);
}

static void apply(Function function, const float* x, float* y, int count) {
    for (int i = 0; i < count; i += kLanes) {
        const int lanes = count - i < kLanes ? count - i : kLanes;
        const F32 v = load_partial(x + i, lanes);
        F32 result = zero();
        switch (function) {
            case Function::Exp:
                result = exp(v);
                break;
            case Function::Expm1BelowZero:
                result = expm1_below_zero(negate(abs(v)));
                break;
            case Function::Tanh:
                result = tanh(v);
                break;
            case Function::Erf:
                result = erf(v);
                break;
            case Function::Sigmoid:
                result = sigmoid(v);
                break;
            case Function::Sqrt:
                result = sqrt(v);
                break;
            case Function::Negate:
                result = negate(v);
                break;
            case Function::Abs:
                result = abs(v);
                break;
            case Function::Round:
                result = to_f32(to_int(v));
                break;
        }
        store_partial(y + i, result, lanes);
    }
}

static float sum(const float* x) { return reduce_add(load(x)); }
static float largest(const float* x) { return reduce_max(load(x)); }

static void fused(const float* a, const float* b, float* c) { store(c, fused_fma(load(a), load(b), load(c))); }

static void dot_bytes(const uint8_t* a, const int8_t* b, int32_t* sums) {
    I32 acc;
    memcpy(&acc, sums, sizeof acc);
    acc = dot_quads(acc, a, b);
    memcpy(sums, &acc, sizeof acc);
}

static bool pairs(const BF16* a, const BF16* b, float* sums) {
#if PACE_ISA_LEVEL >= 4
    store(sums, dot_pairs(load_pairs(a), load_pairs(b), load(sums)));
    return true;
#else
    (void)a, (void)b, (void)sums;
    return false;
#endif
}

constexpr Probe probe = {PACE_ISA_LEVEL,
                         PACE_ISA_EMULATED,
                         kLanes,
                         apply,
                         sum,
                         largest,
                         convert<float, BF16>,
                         convert<float, F16>,
                         convert<float, int8_t>,
                         convert<BF16, float>,
                         convert<F16, float>,
                         convert<int8_t, float>,
                         dot_bytes,
                         pairs,
                         fused};
