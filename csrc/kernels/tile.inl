// AMX tiles: eight registers of 16 rows x 64 bytes. Real tiles use inline assembly, because the compiler's intrinsics
// are macros that only accept literal register numbers. Emulated ones are a thread-local array.
//
// NUMERICS of tile_dot<Element, C, A, B>, as defined in Intel's manual:
//
//   BF16, tdpbf16ps   For each element, the 16 products of even k are one chain in ascending order from zero, and those
//                     of odd k another. The result is C + (even + odd). Subnormals count as zero.
//
//   int8_t, tdpbssd   C + the 64 products, in 32-bit integers.
//
// The emulation refuses what a CPU refuses (an invalid opcode): tiles that are not configured, and shapes that do not
// match.
#if PACE_ISA_LEVEL >= 5

struct TileConfig {
    uint8_t palette, start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64);

#if PACE_ISA_EMULATED

struct TileState {
    TileConfig config;
    alignas(64) uint8_t data[8][16][64];
};
static thread_local TileState tile_state;

PACE_INLINE void require(bool what_a_cpu_does) {
    if (!what_a_cpu_does) __builtin_trap();
}
PACE_INLINE void tile_configure(const TileConfig& config) {
    require(config.palette == 1);
    for (int t = 0; t < 8; ++t)
        require(config.rows[t] <= 16 && config.row_bytes[t] <= 64 &&
                (config.rows[t] == 0) == (config.row_bytes[t] == 0));
    tile_state = {config, {}};
}
template <int t>
PACE_INLINE void require_tile() {
    require(tile_state.config.rows[t] > 0);
}
template <int c, int a, int b>
PACE_INLINE void require_product() {
    const TileConfig& config = tile_state.config;
    require_tile<c>(), require_tile<a>(), require_tile<b>();
    require(config.rows[c] == config.rows[a] && config.row_bytes[c] == config.row_bytes[b] &&
            config.row_bytes[a] == 4 * config.rows[b]);
}
PACE_INLINE void tile_release() { tile_state.config = {}; }
template <int t>
PACE_INLINE void tile_zero() {
    require_tile<t>();
    memset(tile_state.data[t], 0, sizeof tile_state.data[t]);
}
template <int t>
PACE_INLINE void tile_load(const void* p, int64_t stride) {
    require_tile<t>();
    for (int r = 0; r < tile_state.config.rows[t]; ++r)
        memcpy(tile_state.data[t][r], (const char*)p + r * stride, tile_state.config.row_bytes[t]);
}
template <int t>
PACE_INLINE void tile_store(void* p, int64_t stride) {
    require_tile<t>();
    for (int r = 0; r < tile_state.config.rows[t]; ++r)
        memcpy((char*)p + r * stride, tile_state.data[t][r], tile_state.config.row_bytes[t]);
}
template <int c, int a, int b>
PACE_INLINE void tile_dot_bf16() {
    for (int m = 0; m < tile_state.config.rows[c]; ++m) {
        F32 even = zero(), odd = zero(), sum = load((const float*)tile_state.data[c][m]);
        for (int k = 0; k < tile_state.config.row_bytes[a] / 4; ++k) {
            const BF16* pair = (const BF16*)tile_state.data[a][m] + 2 * k;
            const BF16* column = (const BF16*)tile_state.data[b][k];
            for (int n = 0; n < 16; ++n) {
                even.v[n] = flush_subnormal(__builtin_fmaf(flush_subnormal(to_float(pair[0])),
                                                           flush_subnormal(to_float(column[2 * n])), even.v[n]));
                odd.v[n] = flush_subnormal(__builtin_fmaf(flush_subnormal(to_float(pair[1])),
                                                          flush_subnormal(to_float(column[2 * n + 1])), odd.v[n]));
            }
        }
        for (int n = 0; n < 16; ++n) sum.v[n] = flush_subnormal(sum.v[n] + flush_subnormal(even.v[n] + odd.v[n]));
        store((float*)tile_state.data[c][m], sum);
    }
}
template <int c, int a, int b>
PACE_INLINE void tile_dot_int8() {
    for (int m = 0; m < tile_state.config.rows[c]; ++m) {
        int32_t sums[16];
        memcpy(sums, tile_state.data[c][m], sizeof sums);
        for (int k = 0; k < tile_state.config.row_bytes[a]; ++k)
            for (int n = 0; n < 16; ++n)
                sums[n] += int32_t(int8_t(tile_state.data[a][m][k])) *
                           int32_t(int8_t(tile_state.data[b][k / 4][4 * n + k % 4]));
        memcpy(tile_state.data[c][m], sums, sizeof sums);
    }
}
template <class Element, int c, int a, int b>
PACE_INLINE void tile_dot() {
    require_product<c, a, b>();
    if constexpr (std::is_same_v<Element, BF16>)
        tile_dot_bf16<c, a, b>();
    else
        tile_dot_int8<c, a, b>();
}

#else

PACE_INLINE void tile_configure(const TileConfig& config) { __asm__ volatile("ldtilecfg %0" ::"m"(config)); }
PACE_INLINE void tile_release() { __asm__ volatile("tilerelease"); }
template <int t>
PACE_INLINE void tile_zero() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(t));
}
template <int t>
PACE_INLINE void tile_load(const void* p, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(t) : "memory");
}
template <int t>
PACE_INLINE void tile_store(void* p, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(t) : "memory");
}
template <class Element, int c, int a, int b>
PACE_INLINE void tile_dot() {
    if constexpr (std::is_same_v<Element, BF16>)
        __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
    else
        __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
}

#endif
#endif
