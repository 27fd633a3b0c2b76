// Machine limits: reading memory, and multiply-adds on registers. Results are used, so that the compiler cannot remove
// the work.

// Reads count floats (a multiple of 128) once, front to back, in eight independent sums.
static float read_floats(const float* p, int64_t count) {
    F32 sum[8];
    PACE_EACH(i, 8) sum[i] = zero();
    for (int64_t at = 0; at + 8 * kLanes <= count; at += 8 * kLanes) {
        PACE_EACH(i, 8) sum[i] = sum[i] + load(p + at + i * kLanes);
    }
    F32 total = zero();
    PACE_EACH(i, 8) total = total + sum[i];
    volatile float result = reduce_add(total);
    return result;
}

// `steps` rounds of 12 independent multiply-adds; returns the floating point operations of one round.
static double spin_fma(int64_t steps) {
    constexpr int kSums = 12;
    F32 sum[kSums];
    PACE_EACH(i, kSums) sum[i] = broadcast(float(i));
    const F32 a = broadcast(0.999f), b = broadcast(0.001f);
    for (int64_t step = 0; step < steps; ++step) {
        PACE_EACH(i, kSums) sum[i] = fma(sum[i], a, b);
    }
    F32 total = zero();
    PACE_EACH(i, kSums) total = total + sum[i];
    volatile float result = reduce_add(total);
    (void)result;
    return 2.0 * kSums * kLanes;
}
