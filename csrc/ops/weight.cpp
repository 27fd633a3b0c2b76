// Packed weights: header, packing by rows, gathering of rows.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "pace/ops.h"
#include "quantized_weight.h"

namespace pace {

namespace {

char* panel_at(const PackedHeader& h, const void* weight, int64_t panel) {
    return (char*)weight + (h.panel(panel) - reinterpret_cast<const char*>(&h));
}

}  // namespace

Place place_of(const PackedHeader& h, int64_t r) {
    if (!h.glu) return {r / kPanelRows, r % kPanelRows};
    const int64_t half = h.n / 2, in_half = r % half;
    return {in_half / kPanelRows * 2 + (r >= half), in_half % kPanelRows};
}

int64_t rows_in_panel(const PackedHeader& h, int64_t row, int64_t count) {
    count = std::min(count, kPanelRows - place_of(h, row).row);
    return h.glu && row < h.n / 2 ? std::min(count, h.n / 2 - row) : count;
}

int64_t rows_of_chunk(const PackedHeader& h) {
    const int64_t row_bytes = divide_up(h.panel_bytes(), kPanelRows);
    return round_up(std::max<int64_t>(1, 256 * 1024 / std::max<int64_t>(1, row_bytes)), kPanelRows);
}

Layout preferred_layout(const PackedFormat& format) {
    if (format.code == Code::I8) return Layout::PanelI8;
    if (format.code == Code::U4) return Layout::PanelU4;
    if (format.code == Code::F8) return Layout::PanelF8;
    if (format.dtype == DType::F32) return Layout::PanelF32;
    if (format.dtype == DType::F16) return Layout::PanelF16;
    return kernels().bf16_layout;
}

static PackedHeader make_header(int64_t n, int64_t k, const PackedFormat& format, bool glu) {
    if (n < 1 || k < 1 || (glu && n % 2))
        throw std::invalid_argument("a packed weight needs n >= 1 and k >= 1, and an even n for gate and up; got n = " +
                                    std::to_string(n) + ", k = " + std::to_string(k));
    if (format.group < 0 || format.group % 16 || format.group > INT32_MAX)
        throw std::invalid_argument("a group is a multiple of 16 weights, or 0 for a whole row; got " +
                                    std::to_string(format.group));
    PackedHeader h = {};
    h.magic = PackedHeader::kMagic;
    h.layout = preferred_layout(format);
    h.dtype = format.dtype;
    h.glu = glu;
    h.n = n;
    h.k = k;
    h.has_mins = format.has_mins;
    h.group = uint32_t(format.group);
    if (format.code == Code::U4)
        for (int c = 0; c < 16; ++c) h.levels[c] = format.levels ? format.levels[c] : int8_t(c - 8);
    h.k_padded = k;
    if (h.layout == Layout::PanelBF16Pair) h.k_padded = round_up(k, kPairPadding);
    if (h.quantized()) h.k_padded = round_up(k, h.group ? h.input_group() : 32);
    h.panels = glu ? round_up(n / 2, kPanelRows) / kPanelRows * 2 : round_up(n, kPanelRows) / kPanelRows;
    return h;
}

int64_t packed_bytes(int64_t n, int64_t k, const PackedFormat& format, bool glu) {
    return make_header(n, k, format, glu).bytes();
}

void init_packed(void* weight, int64_t n, int64_t k, const PackedFormat& format, bool glu) {
    const PackedHeader h = make_header(n, k, format, glu);
    std::memcpy(weight, &h, sizeof h);
}

const PackedHeader& packed_header(const void* weight) {
    const PackedHeader& h = *static_cast<const PackedHeader*>(weight);
    if (h.magic != PackedHeader::kMagic) throw std::invalid_argument("not a packed weight: its header is missing");
    return h;
}

void place_packed(void* weight) {
    const PackedHeader& h = packed_header(weight);
    constexpr uintptr_t kPage = 4096;
    ThreadPool::instance().run_on_each([&](int thread, int threads) {
        const auto [first, end] = panels_of_thread(h.panels, thread, threads);
        // A page belongs to the thread whose range holds its first byte; that of the header has been written.
        const uintptr_t stop = reinterpret_cast<uintptr_t>(panel_at(h, weight, end));
        uintptr_t page = (reinterpret_cast<uintptr_t>(panel_at(h, weight, first)) + kPage - 1) / kPage * kPage;
        for (; page < stop; page += kPage) *reinterpret_cast<volatile char*>(page) = 0;
    });
}

// ---- PackOp

void PackOp::prepare(int) {
    const PackedHeader& h = packed_header(weight);
    if (h.quantized()) throw std::invalid_argument("a quantised weight is packed from codes, not from a matrix");
    if (row < 0 || rows < 0 || row + rows > h.n) throw std::invalid_argument("rows to pack lie outside of the weight");
    rows_per_chunk = rows_of_chunk(h);
    chunk_count = (rows + rows_per_chunk - 1) / rows_per_chunk;
}

void PackOp::run(int, int64_t chunk, int) const {
    const PackedHeader& h = packed_header(weight);
    const int64_t end = std::min(rows, (chunk + 1) * rows_per_chunk);
    for (int64_t r = chunk * rows_per_chunk; r < end;) {
        const Place place = place_of(h, row + r);
        const int64_t count = rows_in_panel(h, row + r, end - r);
        PackArgs args = {};
        args.layout = h.layout;
        args.dtype = h.dtype;
        args.panel = panel_at(h, weight, place.panel);
        args.first_row = place.row;
        args.rows = count;
        args.source_dtype = source_dtype;
        args.source_stride_bytes = source_stride * int64_t(dtype_bytes(source_dtype));
        args.source = (const char*)source + r * args.source_stride_bytes;
        args.k = h.k;
        kernels().pack_panel(args);
        r += count;
    }
}

// ---- GatherOp

void GatherOp::prepare(int) {
    const PackedHeader& h = packed_header(weight);
    for (int64_t t = 0; ids && t < count; ++t)
        if (ids[t] < -offset || ids[t] >= h.n - offset)
            throw std::invalid_argument("ids must be in " + std::to_string(-offset) + ".." +
                                        std::to_string(h.n - offset - 1) + "; got " + std::to_string(ids[t]) +
                                        " at index " + std::to_string(t));
    if (!ids && count > h.n) throw std::invalid_argument("more rows than the weight has");
    rows_per_chunk = rows_of_chunk(h);
    chunk_count = (count + rows_per_chunk - 1) / rows_per_chunk;
}

void GatherOp::run(int, int64_t chunk, int) const {
    const PackedHeader& h = packed_header(weight);
    const int64_t row_bytes = h.k * int64_t(widen ? 4 : dtype_bytes(h.dtype));
    const int64_t end = std::min(count, (chunk + 1) * rows_per_chunk);
    for (int64_t t = chunk * rows_per_chunk; t < end; ++t) {
        const Place place = place_of(h, ids ? ids[t] + offset : t);
        char* const row = (char*)out + t * row_bytes;
        if (h.quantized())
            unpack_quantized_row(h, place, order, reinterpret_cast<float*>(row));
        else
            kernels().unpack_row(h.layout, panel_at(h, weight, place.panel), place.row, h.k, row, widen);
    }
}

}  // namespace pace
