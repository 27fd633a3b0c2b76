// Norms, elementwise ops, and ops that sampling needs on rows of logits.
#include <stdexcept>

#include "bindings.h"
#include "pace/ops.h"
#include "pace/row_ops.h"

namespace {

void norm(bool layer, Address x, int64_t x_stride, Address weight, Address bias, float eps, int64_t rows, int64_t k,
          Address y) {
    pace::NormOp op = {};
    op.norm = {layer ? pace::Norm::Kind::Layer : pace::Norm::Kind::Rms, at<const float>(weight), at<const float>(bias),
               eps};
    op.x = at<const float>(x);
    op.x_stride = x_stride;
    op.rows = rows;
    op.k = k;
    op.y = at<float>(y);
    pace::execute(op);
}

void head_norm(bool layer, Address x, int64_t tokens, int64_t heads, int64_t head_dim, int64_t token_stride,
               int64_t head_stride, Address weight, int64_t weight_stride, float eps) {
    pace::HeadNormOp op = {};
    op.x = {at<float>(x), token_stride, head_stride};
    op.tokens = tokens;
    op.heads = heads;
    op.head_dim = head_dim;
    op.norm = {layer ? pace::Norm::Kind::Layer : pace::Norm::Kind::Rms, at<const float>(weight), nullptr, eps,
               weight_stride};
    pace::execute(op);
}

void scale(Address x, int64_t x_stride, int64_t rows, int64_t k, float factor) {
    pace::ScaleOp op = {};
    op.x = at<float>(x);
    op.x_stride = x_stride;
    op.rows = rows;
    op.k = k;
    op.factor = factor;
    pace::execute(op);
}

void softcap(Address x, int64_t x_stride, int64_t rows, int64_t k, float cap) {
    pace::SoftcapOp op = {};
    op.x = at<float>(x);
    op.x_stride = x_stride;
    op.rows = rows;
    op.k = k;
    op.cap = cap;
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
            int64_t masks_stride, Address mask_rows, Address tokens, Address num_top, int64_t most_top, Address values,
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
    op.most_top = most_top;
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
    m.def("scale", scale, release);
    m.def("softcap", softcap, release);
    m.def("argmax", argmax, release);
    m.def("apply_mask", apply_mask, release);
    m.def("sample", sample, release);
    m.def("logprobs", logprobs, release);
}
