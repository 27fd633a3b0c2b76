// Rotary position embedding of all heads of one token, in place.
//
// SHAPES      x: `heads` rows, head_stride floats apart; cos, sin [half].
// DEFINITION  For pair i < half: (a, b) -> (a cos[i] - b sin[i], b cos[i] + a sin[i]).
//
// LAYOUT      half-split:  a = x[i], b = x[half + i]          interleaved: a = x[2i], b = x[2i + 1].
//             Elements from 2 * half on stay as they are (partial rotary).
// NUMERICS    fp32; each product is rounded, then the sum, as in the plain definition. So all instruction sets give the
//             same bits.
//
// The interleaved form (GPT-J) is left to scalar code: a row is a few hundred elements, and linears take most of the
// time.

static void rotary(float* x, int64_t heads, int64_t head_stride, const float* cos, const float* sin, int64_t half,
                   bool interleaved) {
    for (int64_t h = 0; h < heads; ++h, x += head_stride) {
        if (interleaved) {
            for (int64_t i = 0; i < half; ++i) {
                const float a = x[2 * i], b = x[2 * i + 1];
                x[2 * i] = a * cos[i] - b * sin[i];
                x[2 * i + 1] = b * cos[i] + a * sin[i];
            }
            continue;
        }
        for (int64_t i = 0; i < half; i += kLanes) {
            const int n = half - i < kLanes ? int(half - i) : kLanes;
            const F32 a = load_lanes(x + i, n), b = load_lanes(x + half + i, n);
            const F32 c = load_lanes(cos + i, n), s = load_lanes(sin + i, n);
            store_lanes(x + i, a * c - b * s, n);
            store_lanes(x + half + i, b * c + a * s, n);
        }
    }
}
