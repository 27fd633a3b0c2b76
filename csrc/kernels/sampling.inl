// Operations on a row of logits for sampling: argmax, softmax, a token mask, and the search for elements
// above a threshold.
//
// SHAPES      x, y [n], n the vocabulary; bits [ceil(n / 32)].
// DEFINITION  argmax:       the lowest i with x[i] = max(x); -1 if any x is NaN.
//             exp_sum:      max(x) and sum of exp(x - max).
//             softmax:      y = exp(x - max) / sum
//             find_at_least: the next indices i with x[i] >= threshold, ascending.
//             apply_mask:   y = x, but -inf if bit i % 32 of bits[i / 32] is clear; y may be x.
// NUMERICS    fp32. Sums are running totals over 4096 elements, which are added in fp64. The order depends only on n
//             and the instruction set.
//
// All are one pass over the row at the speed of the cache or of exp().

static int64_t argmax(const float* x, int64_t n) {
    F32 largest = broadcast(-__builtin_inff()), nan_seen = zero();
    for (int64_t i = 0; i < n; i += kLanes) {
        const int count = n - i < kLanes ? int(n - i) : kLanes;
        F32 v = load_lanes(x + i, count);
        if (count < kLanes) v = select(less(lane_numbers(), broadcast(float(count))), v, broadcast(-__builtin_inff()));
        nan_seen = select(is_nan(v), v, nan_seen);
        largest = max(v, largest);
    }
    if (any(is_nan(nan_seen))) return -1;
    const float wanted = reduce_max(largest);
    const F32 wanted_lanes = broadcast(wanted);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        if (any(less_equal(wanted_lanes, load(x + i)))) break;
    }
    while (i < n && x[i] != wanted) ++i;
    return i;
}

static ExpSum exp_sum(const float* x, int64_t n) {
    constexpr int64_t kPiece = 4096;
    F32 largest = broadcast(-__builtin_inff());
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) largest = max(load(x + i), largest);
    float maximum = reduce_max(largest);
    for (; i < n; ++i) maximum = x[i] > maximum ? x[i] : maximum;

    const F32 shift = broadcast(maximum);
    double sum = 0.0;
    for (int64_t begin = 0; begin < n; begin += kPiece) {
        const int64_t length = n - begin < kPiece ? n - begin : kPiece;
        sum += sum_over_row(length, [&](int64_t j, int lanes) __attribute__((always_inline)) {
            const F32 e = exp(load_lanes(x + begin + j, lanes) - shift);
            return lanes == kLanes ? e : select(less(lane_numbers(), broadcast(float(lanes))), e, zero());
        });
    }
    return {maximum, sum};
}

static void softmax(const float* x, int64_t n, ExpSum total, float* y) {
    const F32 shift = broadcast(total.max), scale = broadcast(float(1.0 / total.sum));
    for (int64_t i = 0; i < n; i += kLanes) {
        const int count = n - i < kLanes ? int(n - i) : kLanes;
        store_lanes(y + i, exp(load_lanes(x + i, count) - shift) * scale, count);
    }
}

// Searches from *position on. Stops at the end, or when fewer than kLanes places are left in `found`. Returns the
// number of elements found and sets *position to the place where the search continues. NaN is never found.
static int find_at_least(const float* x, int64_t n, float threshold, int64_t* position, int32_t* found, int capacity) {
    const F32 limit = broadcast(threshold);
    int count = 0;
    int64_t i = *position;
    for (; i < n && count + kLanes <= capacity; i += kLanes) {
        const int lanes = n - i < kLanes ? int(n - i) : kLanes;
        if (lanes == kLanes && !any(less_equal(limit, load(x + i)))) continue;
        for (int j = 0; j < lanes; ++j) {
            if (x[i + j] >= threshold) found[count++] = int32_t(i + j);
        }
    }
    *position = i < n ? i : n;
    return count;
}

// A word of ones is copied, or skipped in place, and a word of zeros is only written. Most words of a grammar's mask
// are one or the other. For other words, the bits of one vector are ANDed with powers of two, one in each lane. Lanes
// above zero are allowed. Bits beyond n are ignored.
static void apply_mask(const float* x, const int32_t* bits, int64_t n, float* y) {
    alignas(64) static constexpr float kPowers[16] = {1,   2,   4,    8,    16,   32,   64,    128,
                                                      256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
    const F32 banned = broadcast(-__builtin_inff());
    const I32 lane_bits = to_int(load(kPowers));
    for (int64_t begin = 0; begin < n; begin += 32) {
        const uint32_t word = uint32_t(bits[begin / 32]);
        if (word == 0xffffffffu && y == x) continue;
        const int64_t end = n - begin < 32 ? n : begin + 32;
        for (int64_t i = begin; i < end; i += kLanes) {
            const int count = end - i < kLanes ? int(end - i) : kLanes;
            if (word == 0) {
                store_lanes(y + i, banned, count);
                continue;
            }
            const I32 lanes = broadcast_int(int32_t(word >> (i - begin))) & lane_bits;
            store_lanes(y + i, select(less(zero(), to_f32(lanes)), load_lanes(x + i, count), banned), count);
        }
    }
}
