// Norms, elementwise ops, and ops that sampling needs on rows of logits.
#include <stdexcept>

#include "records.h"

namespace {

using pace::Array;
using pace::HeadsTensor;
using pace::Matrix;

void norm(const Matrix& x, const pace::Norm& norm, Array<float> y) {
    pace::NormOp op = {norm, x.data, x.stride, x.rows, x.columns, y, nullptr, 0, 1, 0, 0};
    pace::execute(op);
}

void head_norm(const HeadsTensor& x, const pace::Norm& norm) {
    pace::HeadNormOp op = {x, x.tokens, x.heads, x.dim, norm, 0, 0};
    pace::execute(op);
}

void scale(const Matrix& x, float factor, Array<const float> factors) {
    pace::ScaleOp op = {x.data, x.stride, x.rows, x.columns, factor, factors};
    pace::execute(op);
}

void softcap(const Matrix& x, float cap) {
    pace::SoftcapOp op = {x.data, x.stride, x.rows, x.columns, cap};
    pace::execute(op);
}

void place_rows(const Matrix& x, const Matrix& rows, Array<const int64_t> at, bool add) {
    pace::PlaceRowsOp op = {x.data, x.stride, x.rows, x.columns, rows.data, rows.stride, rows.rows, at, add, 0, 0};
    pace::execute(op);
}

void pool(const Matrix& x, pace::NamedPooling name, Array<const int32_t> starts, int64_t count, Array<float> y) {
    pace::PoolOp op = {name.kind, x.data, x.stride, x.rows, x.columns, starts, count, y};
    pace::execute(op);
}

void argmax(Address logits, int64_t row_stride, int64_t rows, int64_t n, Address indices) {
    pace::ArgmaxOp op = {at<const float>(logits), row_stride, rows, n, at<int64_t>(indices)};
    pace::execute(op);
}

void apply_mask(Address logits, int64_t row_stride, int64_t n, Address bits, int64_t bits_stride, int64_t masks,
                Address rows) {
    pace::MaskOp op = {at<float>(logits),      row_stride, n, at<const int32_t>(bits), bits_stride, masks,
                       at<const int64_t>(rows)};
    pace::execute(op);
}

void sample(Address logits, int64_t row_stride, int64_t n, int64_t count, Address rows, Address rules,
            int64_t rules_bytes, Address uniform, Address edit_ends, Address edit_lists, Address masks,
            int64_t masks_stride, Address mask_rows, Address tokens, Address num_top, int64_t max_top, Address values,
            Address top_tokens, Address top_values) {
    if (rules_bytes != pace::SampleOp::rules_bytes()) throw std::invalid_argument("RULES_DTYPE is not SampleRules");
    pace::SampleOp op = {};
    op.logits = at<float>(logits);
    op.row_stride = row_stride;
    op.n = n;
    op.count = count;
    op.rows = at<const int64_t>(rows);
    op.rules = at<const pace::SampleRules>(rules);
    op.uniform = at<const double>(uniform);
    op.edit_ends = at<const int64_t>(edit_ends);
    op.edit_lists = at<const int64_t>(edit_lists);
    op.masks = at<const int32_t>(masks);
    op.masks_stride = masks_stride;
    op.mask_rows = at<const int64_t>(mask_rows);
    op.tokens = at<int64_t>(tokens);
    op.num_top = at<const int64_t>(num_top);
    op.max_top = max_top;
    op.logprobs = at<float>(values);
    op.top_tokens = at<int64_t>(top_tokens);
    op.top_logprobs = at<float>(top_values);
    pace::execute(op);
}

void logprobs(Address logits, int64_t row_stride, int64_t n, int64_t count, int64_t top, Address rows, Address tokens,
              Address values, Address top_tokens, Address top_values) {
    pace::LogprobsOp op = {};
    op.logits = at<const float>(logits);
    op.row_stride = row_stride;
    op.n = n;
    op.count = count;
    op.top = top;
    op.rows = at<const int64_t>(rows);
    op.tokens = at<const int64_t>(tokens);
    op.logprobs = at<float>(values);
    op.top_tokens = at<int64_t>(top_tokens);
    op.top_logprobs = at<float>(top_values);
    pace::execute(op);
}

}  // namespace

void bind_rows(py::module_& m) {
    const py::call_guard<py::gil_scoped_release> release;
    m.def("norm", norm, release);
    m.def("head_norm", head_norm, release);
    m.def("scale", scale, py::arg("x"), py::arg("factor"), py::arg("factors") = py::none(), release);
    m.def("softcap", softcap, release);
    m.def("place_rows", place_rows, release);
    m.def("pool", pool, release);
    m.def("argmax", argmax, release);
    m.def("apply_mask", apply_mask, release);
    m.def("sample", sample, release);
    m.def("logprobs", logprobs, release);
}
