// Packed weights: from rows of a matrix to panels of 16 outputs, and back.
//
// SHAPES      source: rows of K elements, fp32, bf16 or fp16, any row stride. panel: 16 rows x k_padded elements of the
//             weight's dtype. Several calls, and several threads, may fill a panel: only its own row writes an element.
//
// LAYOUT      element (row c of the panel, k):
//
//   PanelF32, PanelF16, PanelBF16      k = 0: c0 c1 ... c15 | k = 1: c0 c1 ... c15 | ...
//   PanelBF16Split                     k = 0: c0 c8  c1 c9 ... c7 c15 | k = 1: ...     32-bit lanes: c low, c + 8 high
//   PanelBF16Pair                      k = 0, 1: c0k0 c0k1  c1k0 c1k1 ... c15k0 c15k1 | k = 2, 3: ...
//
// NUMERICS    Conversions round to nearest even, as torch's `.to()`; equal dtypes are copied bit for bit.
//
// WHY THIS WAY  64 k of up to 16 rows are converted row by row (vectors, contiguous) into a 4 KB stage. It stays in the
//               first-level cache while it is transposed. The source is read once and the panel written once, front to
//               back.

PACE_INLINE int64_t element_index(Layout layout, int64_t row, int64_t k) {
    switch (layout) {
        case Layout::PanelBF16Split:
            return k * 16 + (row & 7) * 2 + (row >> 3);
        case Layout::PanelBF16Pair:
            return (k >> 1) * 32 + row * 2 + (k & 1);
        default:
            return k * 16 + row;
    }
}

constexpr int kStageColumns = 64;

template <class T>
static void stage_row(DType dtype, const void* source, int64_t k, T* stage, int64_t count) {
    switch (dtype) {
        case DType::F32:
            return convert_row((const float*)source + k, stage, count);
        case DType::BF16:
            return convert_row((const BF16*)source + k, stage, count);
        case DType::F16:
            return convert_row((const F16*)source + k, stage, count);
        case DType::I8:
            break;  // only for keys and values
    }
}

template <class T, Layout layout>
static void pack_panel_of(const PackArgs& a) {
    T stage[16][kStageColumns];
    T* panel = (T*)a.panel;
    const int rows = int(a.rows);
    for (int64_t k = 0; k < a.k; k += kStageColumns) {
        const int64_t count = a.k - k < kStageColumns ? a.k - k : kStageColumns;
        for (int row = 0; row < rows; ++row) {
            const char* source = (const char*)a.source + row * a.source_stride_bytes;
            if (a.source_dtype == a.dtype)
                memcpy(stage[row], (const T*)source + k, size_t(count) * sizeof(T));
            else
                stage_row(a.source_dtype, source, k, stage[row], count);
        }
        for (int64_t i = 0; i < count; ++i)
            for (int row = 0; row < rows; ++row) panel[element_index(layout, a.first_row + row, k + i)] = stage[row][i];
    }
}

// Writes rows first_row .. first_row + rows of one panel.
static void pack_panel(const PackArgs& a) {
    switch (a.layout) {
        case Layout::PanelF32:
            return pack_panel_of<float, Layout::PanelF32>(a);
        case Layout::PanelF16:
            return pack_panel_of<F16, Layout::PanelF16>(a);
        case Layout::PanelBF16:
            return pack_panel_of<BF16, Layout::PanelBF16>(a);
        case Layout::PanelBF16Split:
            return pack_panel_of<BF16, Layout::PanelBF16Split>(a);
        case Layout::PanelBF16Pair:
            return pack_panel_of<BF16, Layout::PanelBF16Pair>(a);
        case Layout::PanelI8:
        case Layout::PanelU4:
        case Layout::PanelF8:
        case Layout::PanelPlanes:
        case Layout::PanelSuper:
        case Layout::PanelGrid:
        case Layout::Parts:
            break;  // see ops/quantized_weight.cpp
    }
}

// One row of a panel, K elements: widened to fp32, or in the weight's own dtype.
template <class T, Layout layout>
static void unpack_row_of(const void* panel, int64_t row, int64_t k, void* out, bool widen) {
    T stage[kStageColumns];
    for (int64_t begin = 0; begin < k; begin += kStageColumns) {
        const int64_t count = k - begin < kStageColumns ? k - begin : kStageColumns;
        for (int64_t i = 0; i < count; ++i) stage[i] = ((const T*)panel)[element_index(layout, row, begin + i)];
        if (widen)
            convert_row(stage, (float*)out + begin, count);
        else
            memcpy((T*)out + begin, stage, size_t(count) * sizeof(T));
    }
}

static void unpack_row(Layout layout, const void* panel, int64_t row, int64_t k, void* out, bool widen) {
    switch (layout) {
        case Layout::PanelF32:
            return unpack_row_of<float, Layout::PanelF32>(panel, row, k, out, widen);
        case Layout::PanelF16:
            return unpack_row_of<F16, Layout::PanelF16>(panel, row, k, out, widen);
        case Layout::PanelBF16:
            return unpack_row_of<BF16, Layout::PanelBF16>(panel, row, k, out, widen);
        case Layout::PanelBF16Split:
            return unpack_row_of<BF16, Layout::PanelBF16Split>(panel, row, k, out, widen);
        case Layout::PanelBF16Pair:
            return unpack_row_of<BF16, Layout::PanelBF16Pair>(panel, row, k, out, widen);
        case Layout::PanelI8:
        case Layout::PanelU4:
        case Layout::PanelF8:
        case Layout::PanelPlanes:
        case Layout::PanelSuper:
        case Layout::PanelGrid:
        case Layout::Parts:
            break;  // see ops/quantized_weight.cpp
    }
}
