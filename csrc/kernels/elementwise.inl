// Activations, the cap of logits, the epilogue of linear(), and conversions of whole rows.
//
// NUMERICS  fp32, one element at a time: a vector's tail gives the same bits as its body. exp, tanh and erf are those
//           of vec_math.inl. Rows are rounded to nearest even.

template <Activation kind>
PACE_INLINE F32 activate(const ActivationFunction& f, F32 x) {
    if constexpr (kind == Activation::Silu) return x * sigmoid(x);
    if constexpr (kind == Activation::Gelu)
        return broadcast(0.5f) * x * (broadcast(1.0f) + erf(x * broadcast(0.70710678118654752f)));
    if constexpr (kind == Activation::GeluTanh) {
        const F32 inner = broadcast(0.79788456080286536f) * fma(broadcast(0.044715f) * x, x * x, x);
        return broadcast(0.5f) * x * (broadcast(1.0f) + tanh(inner));
    }
    if constexpr (kind == Activation::QuickGelu) return x * sigmoid(broadcast(1.702f) * x);
    // NaN stays NaN below, because min and max return their second operand if one is NaN.
    if constexpr (kind == Activation::Relu) return max(zero(), x);
    if constexpr (kind == Activation::Relu2) return max(zero(), x) * max(zero(), x);
    if constexpr (kind == Activation::Tanh) return tanh(x);
    if constexpr (kind == Activation::Clamp) return max(broadcast(f.low), min(broadcast(f.high), x));
    if constexpr (kind == Activation::Xielu) {
        const F32 line = broadcast(f.beta) * x;
        const F32 curve = expm1_below_zero(min(broadcast(f.eps), x)) - x;
        const F32 negative = fma(broadcast(f.alpha_n), curve, line);
        return select(less(zero(), x), fma(broadcast(f.alpha_p) * x, x, line), negative);
    }
    return x;
}

// Calls run.operator()<kind>() for the kind that is a constant there.
template <class Run>
PACE_INLINE void with_kind(Activation kind, const Run& run) {
    switch (kind) {
        case Activation::Silu:
            return run.template operator()<Activation::Silu>();
        case Activation::Gelu:
            return run.template operator()<Activation::Gelu>();
        case Activation::GeluTanh:
            return run.template operator()<Activation::GeluTanh>();
        case Activation::QuickGelu:
            return run.template operator()<Activation::QuickGelu>();
        case Activation::Relu:
            return run.template operator()<Activation::Relu>();
        case Activation::Relu2:
            return run.template operator()<Activation::Relu2>();
        case Activation::Tanh:
            return run.template operator()<Activation::Tanh>();
        case Activation::Clamp:
            return run.template operator()<Activation::Clamp>();
        case Activation::Xielu:
            return run.template operator()<Activation::Xielu>();
        case Activation::ClampedSwiglu:
            return run.template operator()<Activation::ClampedSwiglu>();
        default:
            return run.template operator()<Activation::None>();
    }
}

template <Activation kind>
static void activation_of(const ActivationFunction& f, const float* x, float* y, int64_t count) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(y + i, activate<kind>(f, load(x + i)));
    if (i < count) store_partial(y + i, activate<kind>(f, load_partial(x + i, int(count - i))), int(count - i));
}

static void activation(const ActivationFunction& f, const float* x, float* y, int64_t count) {
    with_kind(f.kind, [&]<Activation kind>() __attribute__((always_inline)) { activation_of<kind>(f, x, y, count); });
}

// x [groups][width] *= f(gate [groups]).
template <Gate kind>
static void gate_of(const float* gate, float* x, int64_t groups, int64_t width) {
    const auto open = [](F32 g) __attribute__((always_inline)) {
        if constexpr (kind == Gate::Sigmoid) return sigmoid(g);
        if constexpr (kind == Gate::Silu) return g * sigmoid(g);
        if constexpr (kind == Gate::Softplus) return softplus(g);
        return g;
    };
    for (int64_t g = 0; g < groups; g += kLanes) {
        const int lanes = groups - g < kLanes ? int(groups - g) : kLanes;
        const F32 factors = open(load_lanes(gate + g, lanes));
        if (width == 1) {
            store_lanes(x + g, load_lanes(x + g, lanes) * factors, lanes);
            continue;
        }
        float each[kLanes];
        store(each, factors);
        for (int lane = 0; lane < lanes; ++lane) {
            float* const group = x + (g + lane) * width;
            for (int64_t i = 0; i < width; i += kLanes) {
                const int n = width - i < kLanes ? int(width - i) : kLanes;
                store_lanes(group + i, load_lanes(group + i, n) * broadcast(each[lane]), n);
            }
        }
    }
}

static void gate(Gate kind, const float* gate, float* x, int64_t groups, int64_t width) {
    switch (kind) {
        case Gate::Sigmoid:
            return gate_of<Gate::Sigmoid>(gate, x, groups, width);
        case Gate::Silu:
            return gate_of<Gate::Silu>(gate, x, groups, width);
        case Gate::Softplus:
            return gate_of<Gate::Softplus>(gate, x, groups, width);
        default:
            return gate_of<Gate::None>(gate, x, groups, width);
    }
}

// x = cap tanh(x / cap): between -cap and cap.
static void softcap(float* x, int64_t count, float cap) {
    const F32 limit = broadcast(cap);
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(x + i, limit * tanh(load(x + i) / limit));
    const int rest = int(count - i);
    if (rest > 0) store_partial(x + i, limit * tanh(load_partial(x + i, rest) / limit), rest);
}

template <Activation kind>
PACE_INLINE F32 gated(const EpilogueArgs& a, F32 gate, F32 up) {
    if constexpr (kind == Activation::ClampedSwiglu) {
        const F32 limit = broadcast(a.activation.limit);
        const F32 g = min(limit, gate), u = max(broadcast(-a.activation.limit), min(limit, up));  // NaN stays NaN
        return (u + broadcast(1.0f)) * (g * sigmoid(broadcast(a.activation.alpha) * g));
    } else {
        return activate<kind>(a.activation, gate) * up;
    }
}

// ---- Epilogue: out = residual + scale * act(sums + bias), or the glu form of gate and up; one vector of columns.
template <Activation kind>
static void epilogue_row(const EpilogueArgs& a, const float* sums, const float* residual, float* out) {
    for (int64_t column = 0; column < a.columns; column += kLanes) {
        const int lanes = a.columns - column < kLanes ? int(a.columns - column) : kLanes;
        const int64_t at = column / 16 * a.panel_stride + column % 16;
        F32 y = load(sums + at);
        if (a.bias) y = y + load_lanes(a.bias + column, lanes);
        if (a.glu) {
            F32 up = load(sums + at + a.up_offset);
            if (a.bias) up = up + load_lanes(a.up_bias + column, lanes);
            y = gated<kind>(a, y, up);
        } else {
            y = activate<kind>(a.activation, y);
        }
        // A scale of 1 does not change the bits.
        y = a.residual ? fma(broadcast(a.scale), y, load_lanes(residual + column, lanes)) : broadcast(a.scale) * y;
        store_lanes(out + column, y, lanes);
    }
}

template <Activation kind>
static void epilogue_of(const EpilogueArgs& a) {
    for (int64_t row = 0; row < a.rows; ++row)
        epilogue_row<kind>(a, a.sums + row * a.sums_stride, a.residual ? a.residual + row * a.residual_stride : nullptr,
                           a.out + row * a.out_stride);
}

static void linear_epilogue(const EpilogueArgs& a) {
    with_kind(a.activation.kind, [&]<Activation kind>() __attribute__((always_inline)) { epilogue_of<kind>(a); });
}

// ---- Conversions of a row

template <class From, class To>
static void convert_row(const From* from, To* to, int64_t count) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
    if (i < count) store_partial(to + i, load_partial(from + i, int(count - i)), int(count - i));
}

static void round_to_bf16(const float* x, BF16* y, int64_t count, int64_t padded) {
    convert_row(x, y, count);
    for (int64_t i = count; i < padded; ++i) y[i] = BF16{0};
}
