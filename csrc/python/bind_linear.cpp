// Packed weights, linear, embedding, activations, and memory measurements.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>

#include "pace/limits.h"
#include "records.h"

namespace {

using pace::Array;
using pace::Matrix;

// Returns the whole pages inside [address, address + bytes) to the system. Pages of file mappings are read again on
// use.
void release_pages(Address address, size_t bytes) {
    const Address page = Address(sysconf(_SC_PAGESIZE));
    const Address begin = (address + page - 1) / page * page, end = (address + bytes) / page * page;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

pace::PackedFormat format(int dtype, int code, int64_t group, bool has_mins, Address levels, int offset,
                          int group_scales, bool token_inputs) {
    return {pace::DType(dtype),
            pace::Code(code),
            group,
            has_mins,
            at<const int8_t>(levels),
            offset,
            pace::GroupScales(group_scales),
            token_inputs};
}

using Parts = std::vector<std::pair<int64_t, pace::PackedFormat>>;  // rows and format of each part

std::vector<pace::PackedPart> parts_of(const Parts& parts) {
    std::vector<pace::PackedPart> result;
    for (const auto& [rows, format] : parts) result.push_back({rows, format});
    return result;
}

// A single part is stored without the parts layout.
int64_t packed_bytes(const Parts& parts, int64_t k, bool glu) {
    return parts.size() == 1 ? pace::packed_bytes(parts[0].first, k, parts[0].second, glu)
                             : pace::packed_bytes(parts_of(parts), k, glu);
}

void init_packed(Address weight, const Parts& parts, int64_t k, bool glu) {
    if (parts.size() == 1)
        pace::init_packed(at<void>(weight), parts[0].first, k, parts[0].second, glu);
    else
        pace::init_packed(at<void>(weight), parts_of(parts), k, glu);
}

bool is_packed(Address weight, const Parts& parts, int64_t k, bool glu) {
    return parts.size() == 1 ? pace::is_packed(at<const void>(weight), parts[0].first, k, parts[0].second, glu)
                             : pace::is_packed(at<const void>(weight), parts_of(parts), k, glu);
}

void linear(const Matrix& x, const pace::Weight& weight, Array<const float> bias,
            const pace::ActivationFunction& activation, Array<const float> residual, Array<float> out, bool apart) {
    pace::LinearOp op = {};
    op.weight = weight.data;
    op.order = weight.order;
    op.bias = bias;
    op.activation = activation;
    op.apart = apart;
    op.x = x.data;
    op.x_stride = x.stride;
    op.rows = x.rows;
    op.residual = residual;
    op.out = out;
    pace::execute(op);
}

void pack_rows(Address weight, int64_t row, int64_t rows, Address source, int source_dtype, int64_t source_stride) {
    pace::PackOp op = {at<void>(weight),          row,           rows, at<const void>(source),
                       pace::DType(source_dtype), source_stride, 0,    0};
    pace::execute(op);
}

void pack_codes(Address weight, int64_t row, int64_t rows, Address codes, int64_t codes_stride, Address scales,
                Address mins, bool paired) {
    pace::PackQuantizedOp op = {at<void>(weight),
                                row,
                                rows,
                                at<const uint8_t>(codes),
                                codes_stride,
                                at<const float>(scales),
                                at<const float>(mins),
                                paired,
                                0,
                                0};
    pace::execute(op);
}

void pack_super_blocks(Address weight, int64_t row, int64_t rows, Address codes, int64_t codes_stride,
                       Address group_scales, Address group_mins, Address scales, Address mins) {
    pace::PackSuperOp op = {at<void>(weight),
                            row,
                            rows,
                            at<const uint8_t>(codes),
                            codes_stride,
                            at<const int8_t>(group_scales),
                            at<const int8_t>(group_mins),
                            at<const pace::F16>(scales),
                            at<const pace::F16>(mins),
                            0,
                            0};
    pace::execute(op);
}

// Returns False if an element of the source is not finite.
bool quantize_rows(int quantizer, Address source, int source_dtype, int64_t source_stride, int64_t rows, int64_t k,
                   int64_t group, bool rounds_scales, Address bounds, int bound_count, Address code_of_level,
                   Address codes, bool nibbles, Address scales, Address mins, Address super_scales,
                   Address super_mins) {
    std::atomic<bool> all_finite{true};
    pace::QuantizeRowsOp op = {};
    op.row.quantizer = pace::Quantizer(quantizer);
    op.row.rounds_scales = rounds_scales;
    op.row.source_dtype = pace::DType(source_dtype);
    op.row.source = at<const void>(source);
    op.row.k = k;
    op.row.group = group;
    op.row.bounds = at<const float>(bounds);
    op.row.bound_count = bound_count;
    op.row.code_of_level = at<const uint8_t>(code_of_level);
    op.row.codes = at<uint8_t>(codes);
    if (super_scales) {
        op.row.group_scales = at<int8_t>(scales);
        op.row.group_mins = at<int8_t>(mins);
        op.row.super_scales = at<pace::F16>(super_scales);
        op.row.super_mins = at<pace::F16>(super_mins);
    } else {
        op.row.scales = at<float>(scales);
        op.row.mins = at<float>(mins);
    }
    op.rows = rows;
    op.source_stride = source_stride;
    op.nibbles = nibbles;
    op.all_finite = &all_finite;
    pace::execute(op);
    return all_finite;
}

void unpack_blocks(int type, Address source, int64_t stride, int64_t rows, int64_t k, Address codes, Address scales,
                   Address mins, Address super_scales, Address super_mins) {
    pace::UnpackBlocksOp op = {};
    op.source = {type, at<const uint8_t>(source), stride};
    op.rows = rows;
    op.k = k;
    op.out = {at<uint8_t>(codes), at<float>(scales),           at<float>(mins),          at<int8_t>(scales),
              at<int8_t>(mins),   at<pace::F16>(super_scales), at<pace::F16>(super_mins)};
    pace::execute(op);
}

// Returns False if a scale is not finite.
bool pack_blocks(Address weight, int64_t row, int64_t rows, int type, Address source, int64_t stride) {
    std::atomic<bool> all_finite{true};
    pace::PackBlocksOp op = {};
    op.weight = at<void>(weight);
    op.row = row;
    op.rows = rows;
    op.source = {type, at<const uint8_t>(source), stride};
    op.all_finite = &all_finite;
    pace::execute(op);
    return all_finite;
}

void gather_rows(const pace::Weight& weight, Array<const int64_t> ids, int64_t count, Array<void> out, bool widen) {
    pace::GatherOp op = {weight.data, ids, count, out, widen, 0, weight.order, 0, 0};
    pace::execute(op);
}

void activation(const pace::ActivationFunction& activation, const Matrix& x, Array<float> y) {
    pace::ActivationOp op = {activation, x.data, x.stride, x.rows, x.columns, y, 0, 0};
    pace::execute(op);
}

void glu(const pace::ActivationFunction& activation, const Matrix& x, Array<float> y) {
    pace::GluOp op = {activation, x.data, x.stride, x.rows, x.columns / 2, y, 0, 0};
    pace::execute(op);
}

void add_adapters(const Matrix& y, const Matrix& x, const pace::AdapterTable& adapters, const Matrix& routing) {
    pace::AddAdaptersOp op = {};
    op.adapters = adapters;
    op.x = x.data;
    op.x_stride = x.stride;
    op.rows = x.rows;
    op.routing = routing.data;
    op.per_row = routing.columns / 2;
    op.y = y.data;
    op.y_stride = y.stride;
    pace::execute(op);
}

}  // namespace

void bind_linear(py::module_& m) {
    const py::call_guard<py::gil_scoped_release> release;
    py::class_<pace::PackedFormat>(m, "PackedFormat")
        .def(py::init(&format), py::arg("dtype"), py::arg("code") = 0, py::arg("group") = 0,
             py::arg("has_mins") = false, py::arg("levels") = 0, py::arg("offset") = -1, py::arg("group_scales") = 0,
             py::arg("token_inputs") = false);
    m.def("packed_bytes", packed_bytes);
    m.def("init_packed", init_packed);
    m.def("is_packed", is_packed);
    m.def("place_packed", [](Address weight) { pace::place_packed(at<void>(weight)); }, release);
    m.def("pack_rows", pack_rows, release);
    m.def("pack_codes", pack_codes, release);
    m.def("pack_super_blocks", pack_super_blocks, release);
    m.def("quantize_rows", quantize_rows, release);
    m.def("unpack_blocks", unpack_blocks, release);
    m.def("pack_blocks", pack_blocks, release);
    m.def("gather_rows", gather_rows, release);
    m.def("linear", linear, release);
    m.def("activation", activation, release);
    m.def("glu", glu, release);
    m.def("add_adapters", add_adapters, release);
    m.def("release_pages", release_pages);
    m.def("read_bandwidth", pace::read_bandwidth, release, py::arg("buffer_bytes"), py::arg("seconds"));
    m.def("fma_peak", pace::fma_peak, release, py::arg("seconds"));
}
