// Packed weights: header, packing of rows, gathering of rows.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "pace/grids.h"
#include "pace/ops.h"
#include "quantized_weight.h"

namespace pace {

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
    if (is_grid(format.code)) return Layout::PanelGrid;
    if (format.group_scales != GroupScales::None) return Layout::PanelSuper;
    if (format.code == Code::I8) return Layout::PanelI8;
    if (format.code == Code::U4) return Layout::PanelU4;
    if (format.code == Code::F8) return Layout::PanelF8;
    if (format.code == Code::U1 || format.code == Code::U2 || format.code == Code::U5) return Layout::PanelPlanes;
    if (format.dtype == DType::F32) return Layout::PanelF32;
    if (format.dtype == DType::F16) return Layout::PanelF16;
    return kernels().bf16_layout;
}

// Throws std::invalid_argument for super-blocks that no kernel supports.
static void check_super_blocks(int64_t k, const PackedFormat& format) {
    const int bits = code_bits(format.code);
    const bool by_32 = bits == 4 || bits == 5;
    if (bits < 2 || bits > 6 || format.group != (by_32 ? 32 : 16))
        throw std::invalid_argument(
            "super-blocks hold codes of 4 or 5 bits in groups of 32, or of 2, 3 or 6 in groups of 16");
    if (k % kSuperBlock)
        throw std::invalid_argument("rows of super-blocks are multiples of 256 weights; got " + std::to_string(k));
    const bool fits = format.group_scales == GroupScales::Bytes         ? !format.has_mins
                      : format.group_scales == GroupScales::NibblePairs ? format.has_mins && !by_32
                                                                        : !format.has_mins || by_32;
    if (!fits) throw std::invalid_argument("no super-blocks have such scales and minima");
}

// Throws std::invalid_argument unless sums of a row are exact in fp32: up to 2 * 127 * k < 2^24.
static void check_token_inputs(int64_t k, const PackedFormat& format) {
    if (format.code != Code::U2 || format.group || format.offset != 1 || k > kMaxTokenInputs)
        throw std::invalid_argument(
            "inputs with one scale a token need codes of 2 bits with offset 1, a scale for each row, and at most " +
            std::to_string(kMaxTokenInputs) + " inputs");
}

static void check_grid(int64_t k, const PackedFormat& format) {
    if (format.group != grid_type(format.code).group || format.has_mins || format.group_scales != GroupScales::None)
        throw std::invalid_argument("points of this grid come in groups of " +
                                    std::to_string(grid_type(format.code).group) + ", without minima");
    if (k % kSuperBlock)
        throw std::invalid_argument("rows of super-blocks are multiples of 256 weights; got " + std::to_string(k));
}

static PackedHeader make_header(int64_t n, int64_t k, const PackedFormat& format, bool glu) {
    if (n < 1 || k < 1 || (glu && n % 2))
        throw std::invalid_argument("a packed weight needs n >= 1 and k >= 1, and an even n for gate and up; got n = " +
                                    std::to_string(n) + ", k = " + std::to_string(k));
    if (format.group < 0 || format.group % 16 || format.group > INT32_MAX)
        throw std::invalid_argument("a group is a multiple of 16 weights, or 0 for a whole row; got " +
                                    std::to_string(format.group));
    if (is_grid(format.code))
        check_grid(k, format);
    else if (format.group_scales != GroupScales::None)
        check_super_blocks(k, format);
    else if (preferred_layout(format) == Layout::PanelPlanes &&
             (format.group % 32 || (format.code == Code::U5 && !format.group)))
        throw std::invalid_argument("codes of 1, 2 and 5 bits come in groups of a multiple of 32");
    else if (format.code == Code::U3 || format.code == Code::U6)
        throw std::invalid_argument("codes of 3 and 6 bits exist only in super-blocks");
    if (format.token_inputs) check_token_inputs(k, format);
    PackedHeader h = {};
    h.magic = PackedHeader::kMagic;
    h.layout = preferred_layout(format);
    h.bits = uint8_t(code_bits(format.code));
    h.offset = uint8_t(format.offset >= 0 ? format.offset : h.bits ? 1 << (h.bits - 1) : 0);
    h.group_scales = format.group_scales;
    h.dtype = format.dtype;
    h.glu = glu;
    h.n = n;
    h.k = k;
    h.has_mins = format.has_mins;
    h.token_inputs = format.token_inputs;
    h.group = uint32_t(format.group);
    for (int c = 0; c < 16; ++c)
        h.levels[c] = format.levels && format.code == Code::U4 ? format.levels[c] : int8_t(c - h.offset);
    if (is_grid(format.code)) {
        h.offset = uint8_t(format.code);
        std::copy_n(grid_type(format.code).levels, 16, h.levels);
    }
    h.k_padded = k;
    if (h.layout == Layout::PanelBF16Pair) h.k_padded = padded_pairs(k);
    if (h.quantized()) h.k_padded = round_up(k, h.group ? h.input_group() : 32);
    h.panels = glu ? round_up(n / 2, kPanelRows) / kPanelRows * 2 : round_up(n, kPanelRows) / kPanelRows;
    return h;
}

int64_t packed_bytes(int64_t n, int64_t k, const PackedFormat& format, bool glu) {
    return make_header(n, k, format, glu).bytes();
}

// The header for several parts and the offset of each. The last offset is the total size.
static PackedHeader make_header(const std::vector<PackedPart>& parts, int64_t k, bool glu,
                                std::vector<int64_t>& offsets) {
    if (parts.size() < 2 || (glu && (parts.size() != 2 || parts[0].rows != parts[1].rows)))
        throw std::invalid_argument("a weight has two parts or more; one of gate and up has these two, of equal size");
    PackedHeader h = {};
    h.magic = PackedHeader::kMagic;
    h.layout = Layout::Parts;
    h.glu = glu;
    h.group = uint32_t(parts.size());
    h.k = h.k_padded = k;
    int64_t offset = int64_t(sizeof h) + round_up(int64_t(parts.size() * sizeof(int64_t)), 64);
    for (const PackedPart& part : parts) {
        const PackedHeader of_part = make_header(part.rows, k, part.format, false);
        offsets.push_back(offset);
        offset += round_up(of_part.bytes(), 64);
        h.n += part.rows;
        h.panels += of_part.panels;
    }
    offsets.push_back(offset);
    return h;
}

int64_t packed_bytes(const std::vector<PackedPart>& parts, int64_t k, bool glu) {
    std::vector<int64_t> offsets;
    make_header(parts, k, glu, offsets);
    return offsets.back();
}

void init_packed(void* weight, int64_t n, int64_t k, const PackedFormat& format, bool glu) {
    const PackedHeader h = make_header(n, k, format, glu);
    std::memcpy(weight, &h, sizeof h);
}

void init_packed(void* weight, const std::vector<PackedPart>& parts, int64_t k, bool glu) {
    std::vector<int64_t> offsets;
    const PackedHeader h = make_header(parts, k, glu, offsets);
    char* const begin = static_cast<char*>(weight);
    std::memcpy(begin, &h, sizeof h);
    std::memcpy(begin + sizeof h, offsets.data(), parts.size() * sizeof(int64_t));
    for (size_t i = 0; i < parts.size(); ++i) init_packed(begin + offsets[i], parts[i].rows, k, parts[i].format, false);
}

bool is_packed(const void* weight, int64_t n, int64_t k, const PackedFormat& format, bool glu) {
    const PackedHeader h = make_header(n, k, format, glu);
    return std::memcmp(weight, &h, sizeof h) == 0;
}

bool is_packed(const void* weight, const std::vector<PackedPart>& parts, int64_t k, bool glu) {
    std::vector<int64_t> offsets;
    const PackedHeader h = make_header(parts, k, glu, offsets);
    const char* const begin = static_cast<const char*>(weight);
    if (std::memcmp(begin, &h, sizeof h) ||
        std::memcmp(begin + sizeof h, offsets.data(), parts.size() * sizeof(int64_t)))
        return false;
    for (size_t i = 0; i < parts.size(); ++i)
        if (!is_packed(begin + offsets[i], parts[i].rows, k, parts[i].format, false)) return false;
    return true;
}

RowOfPart find_row(const PackedHeader& weight, int64_t row) {
    int part = 0;
    for (; part + 1 < weight.parts() && row >= weight.part(part).n; ++part) row -= weight.part(part).n;
    return {&weight.part(part), row};
}

const PackedHeader& part_of_rows(const void* weight, int64_t& row, int64_t rows) {
    const PackedHeader& h = packed_header(weight);
    if (row < 0 || rows < 0 || row + rows > h.n) throw std::invalid_argument("rows to pack lie outside of the weight");
    const RowOfPart first = find_row(h, row);
    if (first.row + rows > first.part->n)
        throw std::invalid_argument(
            "rows to pack lie in several parts of the weight; pack those of each by themselves");
    row = first.row;
    return *first.part;
}

const PackedHeader& packed_header(const void* weight) {
    const PackedHeader& h = *static_cast<const PackedHeader*>(weight);
    if (h.magic != PackedHeader::kMagic) throw std::invalid_argument("not a packed weight: its header is missing");
    return h;
}

void place_packed(void* weight) {
    const PackedHeader& whole = packed_header(weight);
    constexpr uintptr_t kPage = 4096;
    ThreadPool::instance().run_on_each([&](int thread, int threads) {
        // A page belongs to the thread whose range contains its first byte. The page of the header is already resident.
        const auto touch = [](const PackedHeader& h, int64_t first, int64_t end) {
            const uintptr_t stop = reinterpret_cast<uintptr_t>(h.panel(end));
            uintptr_t page = (reinterpret_cast<uintptr_t>(h.panel(first)) + kPage - 1) / kPage * kPage;
            for (; page < stop; page += kPage) *reinterpret_cast<volatile char*>(page) = 0;
        };
        const auto [first, end] = panels_of_thread(whole.panels, thread, threads);
        if (whole.glu && whole.parts() == 2) {
            for (int half = 0; half < 2; ++half) touch(whole.part(half), first / 2, end / 2);
            return;
        }
        for (int64_t part = 0, before = 0; part < whole.parts(); ++part) {
            const PackedHeader& h = whole.part(int(part));
            const int64_t from = std::clamp<int64_t>(first - before, 0, h.panels),
                          to = std::clamp<int64_t>(end - before, 0, h.panels);
            touch(h, from, to);
            before += h.panels;
        }
    });
}

// ---- PackOp

void PackOp::prepare(int) {
    const PackedHeader& h = part_of_rows(weight, row, rows);
    if (h.quantized()) throw std::invalid_argument("a quantised weight is packed from codes, not from a matrix");
    weight = const_cast<PackedHeader*>(&h);
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
    for (int i = 0; i < h.parts(); ++i)
        if (!widen && h.part(i).quantized() != h.part(0).quantized())
            throw std::invalid_argument("a weight with parts of floats and of codes is unpacked to fp32");
    rows_per_chunk = rows_of_chunk(h.part(0));
    chunk_count = (count + rows_per_chunk - 1) / rows_per_chunk;
}

void GatherOp::run(int, int64_t chunk, int) const {
    const PackedHeader& whole = packed_header(weight);
    const int64_t row_bytes = whole.k * int64_t(widen ? 4 : dtype_bytes(whole.part(0).dtype));
    const int64_t end = std::min(count, (chunk + 1) * rows_per_chunk);
    for (int64_t t = chunk * rows_per_chunk; t < end; ++t) {
        const RowOfPart found = find_row(whole, ids ? ids[t] + offset : t);
        const PackedHeader& h = *found.part;
        const Place place = place_of(h, found.row);
        char* const row = (char*)out + t * row_bytes;
        if (h.layout == Layout::PanelGrid)
            unpack_grid_row(h, place, order, reinterpret_cast<float*>(row));
        else if (h.in_super_blocks())
            unpack_super_row(h, place, order, reinterpret_cast<float*>(row));
        else if (h.quantized())
            unpack_quantized_row(h, place, order, reinterpret_cast<float*>(row));
        else
            kernels().unpack_row(h.layout, h.panel(place.panel), place.row, h.k, row, widen);
    }
}

}  // namespace pace
