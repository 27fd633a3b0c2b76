// The weights for drawing tokens of a row. The row is processed in pieces of kSumBlock, which stay in cache.
//
// SHAPES      x, w [n]; maxima [ceil(n / kPeakBlock)]; near, found [n + kLanes].
//
// DEFINITION  The weight of an element is 2^t, t = (x - shift) * scale. With the row's largest element as shift and
//             log2(e) / temperature as scale, it is the probability relative to the largest one.
//
//             block_peaks:  maxima[b] = max of x[kPeakBlock b ..]; false if any x is NaN.
//             survey_piece: the same maxima, and the sum of all weights. Without limits, also the sum of weight * t if
//                           requested. With limits, the sum of the weights with key >= sure, and near becomes the x with
//                           sure > key >= least, in order. The shift may be smaller than x, while t stays below 100. The
//                           sum of all is NaN if any x is.
//             weigh:        w[i] = weight.
//             sum_likely:   the sum of the weights with x >= least.
//
//             find_between: the indices with low <= x < high, ascending from `index` on.
//             sum_from:     the sum of w[i] with key[i] >= least.
//
// NUMERICS    fp32; sums of a piece use a few running totals in each lane. x = -inf weighs exactly 0. sum_likely()
//             compacts the kept elements before it weighs them, so that few elements cost few powers.
//
// The key is x. For typical tokens it is -|x - centre|.

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

static void weigh(const float* x, int64_t n, float shift, float scale, float* w) {
    const F32 first = broadcast(shift), factor = broadcast(scale);
    for (int64_t i = 0; i < n; i += kLanes) {
        const int lanes = n - i < kLanes ? int(n - i) : kLanes;
        store_lanes(w + i, power_of_two_below_one((load_lanes(x + i, lanes) - first) * factor), lanes);
    }
}

PACE_INLINE int store_where(float* p, F32 a, Mask m) { return store_where(reinterpret_cast<int32_t*>(p), bits(a), m); }

// A vector of x, with -inf in the lanes beyond the `left` elements of a row.
PACE_INLINE F32 load_row(const float* x, int64_t left) {
    if (left >= kLanes) return load(x);
    if (left <= 0) return broadcast(-__builtin_inff());
    return select(less(lane_numbers(), broadcast(float(left))), load_lanes(x, int(left)), broadcast(-__builtin_inff()));
}

enum class Keys { None, Value, Distance };

// Running totals of a survey, in each lane.
struct Totals {
    F32 all, sure, surplus, largest;
};

// Adds a vector to the totals; writes the elements between the limits, and returns their number.
template <bool kSurplus, Keys kKeys>
PACE_INLINE int add_vector(F32 x, F32 shift, F32 scale, F32 centre, F32 sure, F32 least, Totals* totals, float* near) {
    const F32 t = (x - shift) * scale, weight = power_of_two_below_one(t);
    totals->largest = max(x, totals->largest);
    totals->all = totals->all + weight;
    if (kSurplus) totals->surplus = fma(max(broadcast(-127.0f), t), weight, totals->surplus);
    if (kKeys == Keys::None) return 0;
    const F32 key = kKeys == Keys::Value ? x : from_bits(bits(x - centre) | broadcast_int(INT32_MIN));
    totals->sure = totals->sure + select(less_equal(sure, key), weight, zero());
    return store_where(near, x, less(key, sure) & less_equal(least, key));
}

// Elements between those that are read and those that are prefetched.
constexpr int64_t kAhead = 1024;

// Prefetches the row, because computing powers leaves the memory idle.
template <bool kSurplus, Keys kKeys>
PACE_INLINE PieceSums survey(const float* x, int64_t n, float shift, float scale, const KeyLimits* limits,
                             float* maxima, float* near) {
    const KeyLimits given = kKeys == Keys::None ? KeyLimits{} : *limits;
    const F32 first = broadcast(shift), factor = broadcast(scale), centre = broadcast(given.centre);
    const F32 sure = broadcast(given.sure), least = broadcast(given.least), lowest = broadcast(-__builtin_inff());
    Totals even = {zero(), zero(), zero(), lowest}, odd = even;
    int count = 0;
    const auto add = [&](F32 a, F32 b) __attribute__((always_inline)) {
        count += add_vector<kSurplus, kKeys>(a, first, factor, centre, sure, least, &even, near + count);
        count += add_vector<kSurplus, kKeys>(b, first, factor, centre, sure, least, &odd, near + count);
    };
    for (int64_t begin = 0; begin < n; begin += kPeakBlock) {
        const int64_t end = n - begin < kPeakBlock ? n : begin + kPeakBlock;
        even.largest = odd.largest = lowest;
        int64_t i = begin;
        for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
            for (int j = 0; j < 2 * kLanes; j += 16) __builtin_prefetch(x + i + j + kAhead);
            add(load(x + i), load(x + i + kLanes));
        }
        if (i < end) add(load_row(x + i, end - i), load_row(x + i + kLanes, end - i - kLanes));
        maxima[begin / kPeakBlock] = reduce_max(max(even.largest, odd.largest));
    }
    return {reduce_add(even.all + odd.all), reduce_add(even.sure + odd.sure), reduce_add(even.surplus + odd.surplus),
            count};
}

static PieceSums survey_piece(const float* x, int64_t n, float shift, float scale, bool wants_surplus,
                              const KeyLimits* limits, float* maxima, float* near) {
    if (limits == nullptr) {
        return wants_surplus ? survey<true, Keys::None>(x, n, shift, scale, limits, maxima, near)
                             : survey<false, Keys::None>(x, n, shift, scale, limits, maxima, near);
    }
    return limits->typical ? survey<false, Keys::Distance>(x, n, shift, scale, limits, maxima, near)
                           : survey<false, Keys::Value>(x, n, shift, scale, limits, maxima, near);
}

static float sum_likely(const float* x, int64_t n, float shift, float scale, float least) {
    float kept[kSumBlock + kLanes];
    const F32 first = broadcast(shift), factor = broadcast(scale), limit = broadcast(least);
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += kLanes) {
        const F32 v = load_row(x + i, n - i);
        count += store_where(kept + count, v, less_equal(limit, v));
    }
    F32 even = zero(), odd = zero();
    for (int64_t i = 0; i < count; i += 2 * kLanes) {
        even = even + power_of_two_below_one((load_row(kept + i, count - i) - first) * factor);
        odd = odd + power_of_two_below_one((load_row(kept + i + kLanes, count - i - kLanes) - first) * factor);
    }
    return reduce_add(even + odd);
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
    F32 totals[4] = {zero(), zero(), zero(), zero()};
    const auto part = [&](int64_t i) __attribute__((always_inline)) {
        return select(less_equal(limit, load(key + i)), load(w + i), zero());
    };
    int64_t i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
        PACE_EACH(j, 4) totals[j] = totals[j] + part(i + j * kLanes);
    }
    for (; i + kLanes <= n; i += kLanes) totals[0] = totals[0] + part(i);
    float sum = reduce_add((totals[0] + totals[1]) + (totals[2] + totals[3]));
    for (; i < n; ++i) sum += key[i] >= least ? w[i] : 0.0f;
    return sum;
}
