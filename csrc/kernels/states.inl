// Causal convolutions, and recurrences on a head's matrix S [key_dim][value_dim].
//
// DEFINITION  causal_conv:    y = act(bias + w[0] x[t - L + 1] + ... + w[L - 1] x[t]), for each channel.
//             sweep_tokens:   S = decay S + k d', then o = S' q. Without delta, d = gain v.
//             with delta:     d = gain (v - (decay S)' k). Then o is (decay S)' q + (q k) d, with the old S.
// LAYOUT      Rows of S are strided: a slot has value_dim floats between them, the copy of a chunk a few more.
// NUMERICS    fp32. A column of S is a lane; sums over rows have one total and ascend. Every element becomes
//             fma(k, d, decay * s), in a sweep and in a replay of the journal alike. Sums over q and k have 16 totals
//             in a fixed tree. So bits depend neither on the cut of a sequence into steps nor on the width of vectors;
//             only generic, which has no FMA, differs.
//
// With delta, S is read twice for each token, because d needs the sums over all rows. Four vectors of columns have
// eight independent sums, which hides the latency of FMA. A panel of 128 rows is then 16 KB on AVX2, 32 KB on AVX-512.

constexpr int kSweepVectors = 4;

// The matrix from an element on.
template <class T>
PACE_INLINE Strided<T> part_of(Strided<T> matrix, int64_t row, int64_t column) {
    return {matrix.data + row * matrix.stride + column, matrix.stride};
}

// ---- Convolution

static void causal_conv(const ConvRow& row) {
    for (int64_t c = 0; c < row.channels; c += kLanes) {
        const int n = row.channels - c < kLanes ? int(row.channels - c) : kLanes;
        F32 y = row.bias ? load_lanes(row.bias + c, n) : zero();
        for (int64_t j = 0; j < row.kernel; ++j) {
            y = fma(load_lanes(row.weight + j * row.weight_stride + c, n), load_lanes(row.inputs[j] + c, n), y);
        }
        store_lanes(row.out + c, row.silu ? y * sigmoid(y) : y, n);
    }
}

// ---- Tokens

// A sum over elements with 16 totals on every instruction set.
struct Sum16 {
    static constexpr int kParts = 16 / kLanes;
    F32 parts[kParts];
};

PACE_INLINE float total_of(Sum16 sum) {
    for (int width = Sum16::kParts / 2; width > 0; width /= 2) {
        for (int p = 0; p < width; ++p) sum.parts[p] = sum.parts[p] + sum.parts[p + width];
    }
    return reduce_add(sum.parts[0]);
}

// Calls body(i, p, n) for n lanes from element i on, which belong to part p of a Sum16.
template <class Body>
PACE_INLINE void for_each_part(int64_t count, const Body& body) {
    for (int64_t i = 0; i < count; i += kLanes) {
        body(i, int(i / kLanes % Sum16::kParts), count - i < kLanes ? int(count - i) : kLanes);
    }
}

PACE_INLINE F32 step_of(const TokenInputs& a, F32 x, F32 bias) {
    return min(broadcast(a.max_step), max(broadcast(a.min_step), softplus(x + bias)));  // NaN stays NaN
}

PACE_INLINE F32 decay_of(const TokenInputs& a, F32 x, F32 bias) {
    if (a.lower_bound < 0) {
        return exp(broadcast(a.lower_bound) * sigmoid(broadcast(-a.rate) * (x + bias)));
    }
    return exp(broadcast(a.rate) * step_of(a, x, bias));
}

// Decays and gains of all tokens, a lane for each token.
static void prepare_scalars(const TokenInputs& a, const PreparedTokens& to) {
    float steps[kStateTokens] = {}, gates[kStateTokens] = {}, decays[kStateTokens], gains[kStateTokens];
    for (int64_t t = 0; t < a.count; ++t) {
        if (a.decay_dim == 1) steps[t] = a.steps[t * a.steps_stride];
        if (a.delta) gates[t] = a.beta[t * a.beta_stride];
    }
    for (int t = 0; t < a.count; t += kLanes) {
        const F32 x = load(steps + t), bias = broadcast(a.step_bias[0]);
        store(decays + t, decay_of(a, x, bias));
        store(gains + t, a.delta ? broadcast(a.beta_scale) * sigmoid(load(gates + t)) : step_of(a, x, bias));
    }
    for (int64_t t = 0; t < a.count; ++t) {
        if (a.decay_dim == 1) to.decay[t] = decays[t];
        to.gain[t] = gains[t];
    }
}

static void prepare_tokens(const TokenInputs& a, const PreparedTokens& to) {
    prepare_scalars(a, to);
    const float query_scale = inverse_sqrt(float(a.key_dim));
    for (int64_t t = 0; t < a.count; ++t) {
        const float *const q = a.q + t * a.q_stride, *const k = a.k + t * a.k_stride;
        float *const key = to.key + t * to.stride, *const read_key = to.read_key + t * to.stride;
        float *const read_query = to.read_query + t * to.stride, *const decay = to.decay + t * to.decay_stride;
        if (!a.delta) {
            for_each_part(a.key_dim, [&](int64_t i, int, int n) __attribute__((always_inline)) {
                store_lanes(key + i, load_lanes(k + i, n), n);
                store_lanes(read_query + i, load_lanes(q + i, n), n);
            });
            continue;
        }
        if (a.decay_dim > 1) {
            for_each_part(a.key_dim, [&](int64_t i, int, int n) __attribute__((always_inline)) {
                const F32 x = load_lanes(a.steps + t * a.steps_stride + i, n);
                store_lanes(decay + i, decay_of(a, x, load_lanes(a.step_bias + i, n)), n);
            });
        }
        Sum16 queries, keys, dots;
        PACE_EACH(p, Sum16::kParts) queries.parts[p] = keys.parts[p] = dots.parts[p] = zero();
        for_each_part(a.key_dim, [&](int64_t i, int p, int n) __attribute__((always_inline)) {
            const F32 x = load_lanes(q + i, n), y = load_lanes(k + i, n);
            queries.parts[p] = fma(x, x, queries.parts[p]);
            keys.parts[p] = fma(y, y, keys.parts[p]);
            dots.parts[p] = fma(x, y, dots.parts[p]);
        });
        const float query_unit = inverse_sqrt(total_of(queries) + kUnitEps) * query_scale;
        const float key_unit = inverse_sqrt(total_of(keys) + kUnitEps);
        to.dot[t] = total_of(dots) * query_unit * key_unit;
        for_each_part(a.key_dim, [&](int64_t i, int, int n) __attribute__((always_inline)) {
            const F32 d = a.decay_dim > 1 ? load_lanes(decay + i, n) : broadcast(decay[0]);
            const F32 unit = load_lanes(k + i, n) * broadcast(key_unit);
            store_lanes(key + i, unit, n);
            store_lanes(read_key + i, d * unit, n);
            store_lanes(read_query + i, d * (load_lanes(q + i, n) * broadcast(query_unit)), n);
        });
    }
}

// ---- Sweeps over some rows of V vectors of columns. `tail`: columns of the last vector.

// keys += S' k, queries += S' q
template <int V>
static void read_rows(Strided<const float> s, int64_t rows, int tail, const float* k, const float* q, float* keys,
                      float* queries) {
    F32 of_k[V], of_q[V];
    PACE_EACH(v, V) of_k[v] = load(keys + v * kLanes);
    PACE_EACH(v, V) of_q[v] = load(queries + v * kLanes);
    const auto sweep = [&](auto whole) __attribute__((always_inline)) {
        for (int64_t i = 0; i < rows; ++i) {
            const float* const row = s.data + i * s.stride;
            const F32 key = broadcast(k[i]), query = broadcast(q[i]);
            PACE_EACH(v, V) {
                const F32 x = whole.value || v + 1 < V ? load(row + v * kLanes) : load_partial(row + v * kLanes, tail);
                of_k[v] = fma(key, x, of_k[v]);
                of_q[v] = fma(query, x, of_q[v]);
            }
        }
    };
    tail == kLanes ? sweep(std::true_type()) : sweep(std::false_type());
    PACE_EACH(v, V) store(keys + v * kLanes, of_k[v]);
    PACE_EACH(v, V) store(queries + v * kLanes, of_q[v]);
}

// S = decay S + k d'; with kReads also queries += S' q of the new S. kPerRow: a decay for each row.
template <int V, bool kPerRow, bool kReads>
static void write_rows(Strided<const float> from, Strided<float> to, int64_t rows, int tail, const float* decay,
                       const float* k, const float* delta, const float* q, float* queries) {
    F32 d[V], of_q[V];
    PACE_EACH(v, V) d[v] = v + 1 < V ? load(delta + v * kLanes) : load_lanes(delta + v * kLanes, tail);
    PACE_EACH(v, V) of_q[v] = kReads ? load(queries + v * kLanes) : zero();
    const auto sweep = [&](auto whole) __attribute__((always_inline)) {
        for (int64_t i = 0; i < rows; ++i) {
            const float* const old = from.data + i * from.stride;
            float* const row = to.data + i * to.stride;
            const F32 key = broadcast(k[i]), kept = broadcast(decay[kPerRow ? i : 0]);
            const F32 query = kReads ? broadcast(q[i]) : zero();
            PACE_EACH(v, V) {
                const bool all = whole.value || v + 1 < V;
                const F32 x = all ? load(old + v * kLanes) : load_partial(old + v * kLanes, tail);
                const F32 y = fma(key, d[v], kept * x);
                if (all) {
                    store(row + v * kLanes, y);
                } else {
                    store_partial(row + v * kLanes, y, tail);
                }
                if (kReads) of_q[v] = fma(query, y, of_q[v]);
            }
        }
    };
    tail == kLanes ? sweep(std::true_type()) : sweep(std::false_type());
    if (kReads)
        PACE_EACH(v, V) store(queries + v * kLanes, of_q[v]);
}

// Calls body(first, V, tail) for panels of up to kSweepVectors vectors of columns.
template <class Body>
PACE_INLINE void for_each_panel(int64_t columns, const Body& body) {
    for (int64_t first = 0; first < columns; first += kSweepVectors * kLanes) {
        const int64_t rest = columns - first;
        if (rest > 3 * kLanes) {
            body(first, std::integral_constant<int, 4>(), rest < 4 * kLanes ? int(rest - 3 * kLanes) : kLanes);
        } else if (rest > 2 * kLanes) {
            body(first, std::integral_constant<int, 3>(), int(rest - 2 * kLanes));
        } else if (rest > kLanes) {
            body(first, std::integral_constant<int, 2>(), int(rest - kLanes));
        } else {
            body(first, std::integral_constant<int, 1>(), int(rest));
        }
    }
}

template <bool kPerRow>
static void update_columns(const MatrixUpdate& a) {
    for_each_panel(a.columns, [&](int64_t c, auto count, int tail) __attribute__((always_inline)) {
        write_rows<count.value, kPerRow, false>(part_of(a.from, 0, c), part_of(a.to, 0, c), a.key_dim, tail, a.decay,
                                                a.key, a.delta + c, nullptr, nullptr);
    });
}

static void update_matrix(const MatrixUpdate& a) {
    a.decay_dim > 1 ? update_columns<true>(a) : update_columns<false>(a);
}

template <bool kPerRow>
static void sweep_token(const TokenSweep& a, int64_t t, Strided<const float> from) {
    float *const keys = a.sums, *const queries = a.sums + round_up(a.columns, 16);
    const PreparedTokens& p = a.tokens;
    const float *const key = p.key + t * p.stride, *const decay = p.decay + t * p.decay_stride;
    const float *const read_key = p.read_key + t * p.stride, *const read_query = p.read_query + t * p.stride;
    const float* const v = a.v.data + t * a.v.stride;
    float *const out = a.out.data + t * a.out.stride, *const deltas = a.deltas.data + t * a.deltas.stride;
    const F32 gain = broadcast(p.gain[t]);
    for (int64_t c = 0; c < 2 * round_up(a.columns, 16); c += kLanes) store(a.sums + c, zero());
    const auto for_each_block = [&](const auto& body) __attribute__((always_inline)) {
        for (int64_t i = 0; i < a.key_dim; i += a.block_rows) {
            const int64_t rows = a.key_dim - i < a.block_rows ? a.key_dim - i : a.block_rows;
            for_each_panel(a.columns, [&](int64_t c, auto count, int tail)
                                          __attribute__((always_inline)) { body(i, rows, c, count, tail); });
        }
    };
    const auto each_vector = [&](const auto& body) __attribute__((always_inline)) {
        for (int64_t c = 0; c < a.columns; c += kLanes) body(c, a.columns - c < kLanes ? int(a.columns - c) : kLanes);
    };
    if (a.delta) {
        for_each_block([&](int64_t i, int64_t rows, int64_t c, auto count, int tail) __attribute__((always_inline)) {
            read_rows<count.value>(part_of(from, i, c), rows, tail, read_key + i, read_query + i, keys + c,
                                   queries + c);
        });
        each_vector([&](int64_t c, int n) __attribute__((always_inline)) {
            const F32 delta = gain * (load_lanes(v + c, n) - load(keys + c));
            store_lanes(deltas + c, delta, n);
            store(queries + c, fma(broadcast(p.dot[t]), delta, load(queries + c)));
        });
        for_each_block([&](int64_t i, int64_t rows, int64_t c, auto count, int tail) __attribute__((always_inline)) {
            write_rows<count.value, kPerRow, false>(part_of(from, i, c), part_of(a.to, i, c), rows, tail,
                                                    decay + (kPerRow ? i : 0), key + i, deltas + c, nullptr, nullptr);
        });
    } else {
        each_vector([&](int64_t c, int n)
                        __attribute__((always_inline)) { store_lanes(deltas + c, gain * load_lanes(v + c, n), n); });
        for_each_block([&](int64_t i, int64_t rows, int64_t c, auto count, int tail) __attribute__((always_inline)) {
            write_rows<count.value, kPerRow, true>(part_of(from, i, c), part_of(a.to, i, c), rows, tail,
                                                   decay + (kPerRow ? i : 0), key + i, deltas + c, read_query + i,
                                                   queries + c);
        });
    }
    each_vector([&](int64_t c, int n) __attribute__((always_inline)) {
        const F32 y = load(queries + c);
        store_lanes(out + c, a.skip ? fma(broadcast(*a.skip), load_lanes(v + c, n), y) : y, n);
    });
}

static void sweep_tokens(const TokenSweep& a) {
    Strided<const float> from = a.from;
    for (int64_t t = 0; t < a.count; ++t) {
        a.decay_dim > 1 ? sweep_token<true>(a, t, from) : sweep_token<false>(a, t, from);
        from = {a.to.data, a.to.stride};
    }
}
