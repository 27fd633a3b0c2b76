// KernelTable: one documented function pointer for each kernel. Kernels are single-threaded and process a range that
// the caller (csrc/ops) chose. They allocate no memory and do not use Python, torch or threads.
#pragma once

#include "pace/attention.h"
#include "pace/states.h"
#include "pace/types.h"

namespace pace {

// linear: sums = x W' for `rows` rows and `panel_count` panels. See kernels/linear.inl.
struct LinearArgs {
    const void* x;  // [rows][x_stride]: bf16 if rounds_inputs and the weight is bf16 (zero up to k_padded), else fp32
    int64_t x_stride;  // elements
    int64_t rows;
    const void* panels;  // the first panel
    int64_t panel_count;
    int64_t k_padded;     // length of a panel in k
    float* sums;          // [rows][sums_stride], written
    int64_t sums_stride;  // >= 16 * panel_count
};

// A quantised row of inputs, as quantize_input() writes it. First come int8 codes, then space for the same codes as
// int16. It is filled, in the table's own order, only if the table multiplies int16. Then come three numbers for each
// group of inputs. For weights in super-blocks, each group has one number instead, and int16 sums of kInputSum codes
// each follow.
struct QuantizedInput {
    static int64_t bytes(const PackedHeader& h) {
        const int64_t numbers = 4 * h.input_groups();
        const int64_t sums = h.in_super_blocks() ? 2 * h.k_padded / kInputSum : 2 * numbers;
        return round_up(3 * h.k_padded + numbers + sums + (h.token_inputs ? int64_t(sizeof(float)) : 0), 64);
    }
    static const int16_t* short_sums(const void* row, const PackedHeader& h) {
        return reinterpret_cast<const int16_t*>(scales(row, h) + divide_up(h.k_padded, kInputGroup));
    }
    static const int16_t* wide_codes(const void* row, const PackedHeader& h) {
        return reinterpret_cast<const int16_t*>(static_cast<const char*>(row) + h.k_padded);
    }
    static const float* scales(const void* row, const PackedHeader& h) {
        return reinterpret_cast<const float*>(wide_codes(row, h) + h.k_padded);
    }
    static const float* sums(const void* row, const PackedHeader& h) {
        return scales(row, h) + h.input_groups();
    }  // sums of codes
    // Initial values of the sums of products of codes. A table that multiplies weights as code + offset starts with
    // -offset * sum. A table that takes products in pairs (kernels/vec_bytes.inl) starts with -own_products().
    static const int32_t* starts(const void* row, const PackedHeader& h) {
        return reinterpret_cast<const int32_t*>(sums(row, h) + h.input_groups());
    }
    // With token_inputs, the scale of all codes of the row; the scales of its groups are 1.
    static const float* token_scale(const void* row, const PackedHeader& h) {
        return reinterpret_cast<const float*>(starts(row, h) + h.input_groups());
    }
};

// linear_quantized: as linear, for quantised weights. See kernels/linear_quantized.inl and linear_float8.inl.
struct QuantizedLinearArgs {
    const void* x;     // rows written by quantize_input(); fp32 for PanelF8
    int64_t x_stride;  // bytes
    int64_t rows;
    const PackedHeader* weight;
    int64_t first_panel, panel_count;
    float* sums;  // [rows][sums_stride], written
    int64_t sums_stride;
};

// linear_epilogue: out = residual + scale * y. y = act(sums + bias), or with glu act(gate + bias) * (up + up_bias).
struct EpilogueArgs {
    const float* sums;  // from the first column of this range on
    int64_t sums_stride;
    int64_t panel_stride;   // distance between groups of 16 columns of sums
    int64_t up_offset;      // with glu: distance from the gate's sums to those of up
    int64_t rows, columns;  // size of out
    bool glu;
    ActivationFunction activation;
    float scale = 1;
    const float* bias;      // from the first column on; may be null
    const float* up_bias;   // with glu and bias
    const float* residual;  // may be null, or equal out
    int64_t residual_stride;
    float* out;
    int64_t out_stride;
};

// pack_panel: rows [first_row, first_row + rows) of one panel from a matrix. See kernels/pack.inl.
struct PackArgs {
    Layout layout;
    DType dtype;  // dtype of the weight
    void* panel;
    int64_t first_row, rows;
    DType source_dtype;
    const void* source;
    int64_t source_stride_bytes;  // between rows; k is contiguous
    int64_t k;
};

// quantize_row: a row of floats to codes and scales. See kernels/quantize_weights.inl and quantize_super.inl.
struct QuantizeRow {
    Quantizer quantizer;
    bool rounds_scales;  // rounds scales to eleven bits, the precision of packed group scales
    DType source_dtype;
    const void* source;
    int64_t k, group;     // the last group may be shorter
    const float* bounds;  // [bound_count] thresholds between the levels of Codebook and MXFP4, ascending
    int bound_count;
    const uint8_t* code_of_level;  // [bound_count + 1] for Codebook: codes by ascending level; null: 0, 1, ...
    float* stage;                  // scratch of stage_floats(group)
    uint8_t* codes;                // [k], a byte each; 15 bytes beyond are overwritten
    float* scales;                 // [groups]
    float* mins;                   // [groups] for AffineInt4, else null
    // For the K types, instead of scales and mins: one number for each group, and one for each super-block, [k / 256].
    // Minima exist only for the types that have them.
    int8_t *group_scales, *group_mins;
    F16 *super_scales, *super_mins;

    static int64_t stage_floats(int64_t group) { return 2 * round_up(group, 16); }
};

// One row of a norm.
struct NormRow {
    const float* x;
    const float* weight;  // may be null for layer_norm
    const float* bias;    // layer_norm only; or null
    float* y;             // may be x
};

// max(x) and the sum of exp(x - max) of a row.
struct ExpSum {
    float max;
    double sum;
};

// Number of elements whose weights are summed in fp32 before fp64. A block is 16 KB, so that reading it a second time
// is cheap.
constexpr int64_t kSumBlock = 4096;

// Number of elements in each block whose maximum is kept. With smaller blocks, the k-th largest maximum is a closer
// bound of the k-th largest element, but takes longer to find.
constexpr int64_t kPeakBlock = 256;

// Limits between which a cut is looked for; see kernels/weights.inl.
struct KeyLimits {
    bool typical;       // the key is -|x - centre|, else x
    float centre;       // if typical
    float sure, least;  // keys
};

// Sums over a piece of a row; see kernels/weights.inl.
struct PieceSums {
    float all, sure;  // sums of all weights, and of the weights with key >= sure
    float surplus;    // the sum of weight * t
    int near;         // number of elements with sure > key >= least
};

struct KernelTable {
    const char* name;  // the name used in PACE_ISA
    int level;         // PACE_ISA_LEVEL: 0 generic, 1 avx2 and avx2_vnni, 2 avx512, 3 avx512_vnni, 4 avx512_bf16, 5 amx
    bool emulated;     // plain C++ equivalent, for tests
    int lanes;         // floats in a vector

    // -- linear (kernels/pack.inl, linear.inl, elementwise.inl)
    Layout bf16_layout;  // layout of bf16 weights for this table; fp32 and fp16 have one layout everywhere
    bool rounds_inputs;  // products with bf16 weights take bf16 inputs, made by round_to_bf16
    int64_t tile_rows;   // rows served by one pass over the weights
    void (*pack_panel)(const PackArgs&);
    // One row of a panel as k elements: fp32 if `widen`, else the weight's dtype.
    void (*unpack_row)(Layout, const void* panel, int64_t row, int64_t k, void* out, bool widen);
    bool (*quantize_row)(const QuantizeRow&);  // returns false if an element is not finite
    void (*linear[3])(const LinearArgs&);      // by the weight's DType
    // -- for quantised weights (kernels/quantize_input.inl, linear_quantized.inl, linear_float8.inl)
    void (*quantize_input)(const float* x, const PackedHeader& weight, void* row);  // x [k] -> QuantizedInput
    void (*linear_quantized)(const QuantizedLinearArgs&);
    // -- after either linear
    void (*linear_epilogue)(const EpilogueArgs&);
    void (*activation)(const ActivationFunction&, const float* x, float* y, int64_t count);  // x may equal y
    void (*softcap)(float* x, int64_t count, float cap);  // x = cap tanh(x / cap), in place
    // x [groups][width] *= f(gate [groups]), in place.
    void (*gate)(Gate, const float* gate, float* x, int64_t groups, int64_t width);
    // y[0..count) rounded to nearest even, y[count..padded) zero.
    void (*round_to_bf16)(const float* x, BF16* y, int64_t count, int64_t padded);

    // -- measurements (kernels/limits.inl)
    float (*read_floats)(const float*, int64_t count);
    double (*spin_fma)(int64_t steps);  // returns the floating point operations of one step

    // -- norms (kernels/norm.inl): one row of k elements
    void (*rms_norm)(const NormRow& row, int64_t k, float eps);
    void (*layer_norm)(const NormRow& row, int64_t k, float eps);

    // -- rotary (kernels/rotary.inl): all heads of one token, in place
    void (*rotary)(float* x, int64_t heads, int64_t head_stride, const float* cos, const float* sin, int64_t half,
                   bool interleaved);

    // -- states (kernels/states.inl): one row of a convolution; some columns of one head's matrix
    void (*causal_conv)(const ConvRow&);
    void (*prepare_tokens)(const TokenInputs&, const PreparedTokens&);
    void (*sweep_tokens)(const TokenSweep&);
    void (*update_matrix)(const MatrixUpdate&);

    // -- attention (kernels/attention.inl, attention_partitions.inl). `scratch` holds attention_scratch_floats(). The
    // kernels compute complete rows, or one partition of them as states [rows][partial_floats], or merge such states in
    // order.
    void (*attention)(const AttentionArgs& args, const QueryRows& rows, float* scratch);
    void (*attention_partition)(const AttentionArgs& args, const QueryRows& rows, int64_t partition, float* states,
                                float* scratch);
    void (*attention_merge)(const AttentionArgs& args, const QueryRows& rows, int64_t partitions, const float* states,
                            float* scratch);
    // Writes one token's keys [heads][key_dim] and values [heads][value_dim] to position `slot` of the cache, as its
    // heads from first_head on.
    void (*store_kv)(const float* k, int64_t k_head_stride, const float* v, int64_t v_head_stride, const KvView& kv,
                     int64_t first_head, int64_t heads, int64_t slot);

    // -- sampling (kernels/sampling.inl): one row of n logits
    int64_t (*argmax)(const float* x, int64_t n);  // -1 if any is NaN
    ExpSum (*exp_sum)(const float* x, int64_t n);
    void (*softmax)(const float* x, int64_t n, ExpSum total, float* y);
    int (*find_at_least)(const float* x, int64_t n, float threshold, int64_t* position, int32_t* found, int capacity);
    // y = x, but -inf if bit i is clear; bits [ceil(n / 32)]. y may be x.
    void (*apply_mask)(const float* x, const int32_t* bits, int64_t n, float* y);
    // -- drawing (kernels/weights.inl): a row or a piece of it; at most kSumBlock elements if weights are summed
    bool (*block_peaks)(const float* x, int64_t n, float* maxima);  // false if any is NaN
    void (*weigh)(const float* x, int64_t n, float shift, float scale, float* w);
    // `limits` and `near` may be null.
    PieceSums (*survey_piece)(const float* x, int64_t n, float shift, float scale, bool wants_surplus,
                              const KeyLimits* limits, float* maxima, float* near);
    float (*sum_likely)(const float* x, int64_t n, float shift, float scale, float least);
    // `found` has room for n elements and one vector more.
    int (*find_between)(const float* x, int64_t n, float low, float high, int32_t index, int32_t* found);
    float (*sum_from)(const float* key, const float* w, int64_t n, float least);
};

// The table in use: the best this CPU has, or the choice of PACE_ISA or select_isa().
const KernelTable& kernels();

}  // namespace pace
