// The weights for drawing tokens of a row. The row is processed in pieces of kSumBlock, which stay in cache.
//
// SHAPES      x, w [n] and found [n + kLanes]; maxima [ceil(n / kPeakBlock)].
//
// DEFINITION  The weight of an element is 2^t, t = (x - shift) * scale. With the row's largest element as shift and
//             log2(e) / temperature as scale, it is the probability relative to the largest one.
//
//             block_peaks:   maxima[b] = max of x[kPeakBlock b ..]; false if any x is NaN.
//             weigh:         w[i] = weight; returns their sum.
//             sum_weights:   the sum of all weights and, if requested, the sum of weight * t as surplus.
//             sum_likely:    the sum of the weights with x >= least.
//
//             split_weights: sums of all weights, and of those with key >= sure. Lists the indices with
//                            sure > key >= least, ascending from `index` on. Sums the surplus if typical.
//
//             find_between:  the indices with low <= x < high, ascending from `index` on.
//             sum_from:      the sum of w[i] with key[i] >= least.
//
// NUMERICS    fp32; sums of a piece use one running total in each lane. x = -inf weighs exactly 0. sum_likely()
//             compacts the kept elements before it weighs them, so that few elements cost few powers.
//
// The key is x. For typical tokens it is -|t - level|, the closeness of t to a level.

static bool block_peaks(const float* x, int64_t n, float* maxima) {
    F32 nan_seen = zero();
    for (int64_t begin = 0; begin < n; begin += kPeakBlock) {
        const int64_t end = n - begin < kPeakBlock ? n : begin + kPeakBlock;
        F32 even = broadcast(-__builtin_inff()), odd = even;
        int64_t i = begin;
        for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
            const F32 a = load(x + i), b = load(x + i + kLanes);
            nan_seen = select(is_nan(a + b), a + b, nan_seen);
            even = max(a, even);
            odd = max(b, odd);
        }
        for (; i < end; i += kLanes) {
            const int lanes = end - i < kLanes ? int(end - i) : kLanes;
            const F32 v = load_lanes(x + i, lanes);
            nan_seen = select(is_nan(v), v, nan_seen);
            even = max(select(less(lane_numbers(), broadcast(float(lanes))), v, even), even);
        }
        maxima[begin / kPeakBlock] = reduce_max(max(even, odd));
    }
    return !any(is_nan(nan_seen));
}

static float weigh(const float* x, int64_t n, float shift, float scale, float* w) {
    const F32 first = broadcast(shift), factor = broadcast(scale);
    F32 total = zero();
    for (int64_t i = 0; i < n; i += kLanes) {
        const int lanes = n - i < kLanes ? int(n - i) : kLanes;
        const F32 weight = power_of_two_below_one((load_lanes(x + i, lanes) - first) * factor);
        store_lanes(w + i, weight, lanes);
        total =
            total + (lanes == kLanes ? weight : select(less(lane_numbers(), broadcast(float(lanes))), weight, zero()));
    }
    return reduce_add(total);
}

// Prefetches the next piece of the row meanwhile, because exp() leaves the memory idle.
template <bool kSurplus, bool kOfRow = true>
PACE_INLINE float sum_piece(const float* x, int64_t n, float shift, float scale, float* surplus) {
    const F32 first = broadcast(shift), factor = broadcast(scale), least = broadcast(-127.0f);
    F32 even = zero(), odd = zero(), even_surplus = zero(), odd_surplus = zero();
    int64_t i = 0;
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
        for (int j = 0; kOfRow && j < 2 * kLanes; j += 16) __builtin_prefetch(x + i + j + kSumBlock);
        const F32 t = (load(x + i) - first) * factor, u = (load(x + i + kLanes) - first) * factor;
        const F32 v = power_of_two_below_one(t), w = power_of_two_below_one(u);
        even = even + v;
        odd = odd + w;
        if (kSurplus) even_surplus = fma(max(least, t), v, even_surplus);
        if (kSurplus) odd_surplus = fma(max(least, u), w, odd_surplus);
    }
    for (; i < n; i += kLanes) {
        const int lanes = n - i < kLanes ? int(n - i) : kLanes;
        const F32 t = (load_lanes(x + i, lanes) - first) * factor;
        const F32 w = select(less(lane_numbers(), broadcast(float(lanes))), power_of_two_below_one(t), zero());
        even = even + w;
        if (kSurplus) even_surplus = fma(max(least, t), w, even_surplus);
    }
    if (kSurplus) *surplus = reduce_add(even_surplus + odd_surplus);
    return reduce_add(even + odd);
}

static float sum_weights(const float* x, int64_t n, float shift, float scale, float* surplus) {
    return surplus ? sum_piece<true>(x, n, shift, scale, surplus) : sum_piece<false>(x, n, shift, scale, surplus);
}

// A vector of x, with -inf in the lanes beyond the `left` elements of a row.
PACE_INLINE F32 load_row(const float* x, int64_t left) {
    if (left >= kLanes) return load(x);
    return select(less(lane_numbers(), broadcast(float(left))), load_lanes(x, int(left)), broadcast(-__builtin_inff()));
}

static float sum_likely(const float* x, int64_t n, float shift, float scale, float least) {
    float kept[kSumBlock + 2 * kLanes];
    const F32 limit = broadcast(least);
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += kLanes) {
        const F32 v = load_row(x + i, n - i);
        count += store_where(reinterpret_cast<int32_t*>(kept) + count, bits(v), less_equal(limit, v));
    }
    return sum_piece<false, false>(kept, count, shift, scale, nullptr);
}

// Prefetches the next piece, as sum_piece(). In a tail, the lanes beyond n are neither sure nor near, and weigh
// nothing.
template <bool kTypical, bool kLists>
PACE_INLINE WeightSums split(const float* x, int64_t n, float shift, float scale, const KeyLimits& limits,
                             int32_t index, int32_t* found) {
    const F32 first = broadcast(shift), factor = broadcast(scale), level = broadcast(limits.level);
    const F32 sure = broadcast(limits.sure), least = broadcast(limits.least), lowest = broadcast(-127.0f);
    const I32 numbers = to_int(lane_numbers());
    F32 all = zero(), above = zero(), surplus = zero();
    int count = 0;
    for (int64_t i = 0; i < n; i += kLanes) {
        if (i % 16 == 0) __builtin_prefetch(x + i + kSumBlock);
        const F32 v = load_row(x + i, n - i), t = (v - first) * factor, weight = power_of_two_below_one(t);
        const F32 key = kTypical ? negate(abs(t - level)) : v;
        all = all + weight;
        above = above + select(less_equal(sure, key), weight, zero());
        if (kTypical) surplus = fma(max(lowest, t), weight, surplus);
        if (!kLists) continue;
        const Mask near = less(key, sure) & less_equal(least, key);
        count += store_where(found + count, numbers + broadcast_int(index + int32_t(i)), near);
    }
    return {reduce_add(all), reduce_add(above), reduce_add(surplus), count};
}

static WeightSums split_weights(const float* x, int64_t n, float shift, float scale, const KeyLimits& limits,
                                int32_t index, int32_t* found) {
    if (limits.typical && !(limits.least < limits.sure)) {  // no key is in between
        return split<true, false>(x, n, shift, scale, limits, index, found);
    }
    return limits.typical ? split<true, true>(x, n, shift, scale, limits, index, found)
                          : split<false, true>(x, n, shift, scale, limits, index, found);
}

static int find_between(const float* x, int64_t n, float low, float high, int32_t index, int32_t* found) {
    const F32 least = broadcast(low), limit = broadcast(high);
    const I32 numbers = to_int(lane_numbers());
    int count = 0;
    for (int64_t i = 0; i < n; i += kLanes) {
        const F32 v = load_row(x + i, n - i);
        const Mask wanted = less(v, limit) & less_equal(least, v);
        count += store_where(found + count, numbers + broadcast_int(index + int32_t(i)), wanted);
    }
    return count;
}

static float sum_from(const float* key, const float* w, int64_t n, float least) {
    const F32 limit = broadcast(least);
    F32 total = zero();
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) total = total + select(less_equal(limit, load(key + i)), load(w + i), zero());
    float sum = reduce_add(total);
    for (; i < n; ++i) sum += key[i] >= least ? w[i] : 0.0f;
    return sum;
}
