// AMX tiles: eight registers of 16 rows x 64 bytes. Real ones by inline assembly (the compiler's intrinsics are macros
// that take literal register numbers only), emulated ones as a thread's array.
//
// NUMERICS of tile_dot<C, A, B>, as Intel's manual defines tdpbf16ps: for each element, the 16 products of even k and
// the 16 of odd k are two chains in ascending order that start from zero; C + (even + odd). Subnormals count as zero.
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
    uint8_t data[8][16][64];
};
static thread_local TileState tile_state;

PACE_INLINE void tile_configure(const TileConfig& config) { tile_state.config = config; }
PACE_INLINE void tile_release() {}
template <int t>
PACE_INLINE void tile_zero() {
    memset(tile_state.data[t], 0, sizeof tile_state.data[t]);
}
template <int t>
PACE_INLINE void tile_load(const void* p, int64_t stride) {
    for (int r = 0; r < tile_state.config.rows[t]; ++r)
        memcpy(tile_state.data[t][r], (const char*)p + r * stride, tile_state.config.row_bytes[t]);
}
template <int t>
PACE_INLINE void tile_store(void* p, int64_t stride) {
    for (int r = 0; r < tile_state.config.rows[t]; ++r)
        memcpy((char*)p + r * stride, tile_state.data[t][r], tile_state.config.row_bytes[t]);
}
template <int c, int a, int b>
PACE_INLINE void tile_dot() {
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
template <int c, int a, int b>
PACE_INLINE void tile_dot() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
}

#endif
#endif
