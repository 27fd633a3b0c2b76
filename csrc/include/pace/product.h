// A product with a packed weight, for rows and panels that an op chose. It prepares inputs in the form that the weight
// needs, and computes the sums of all parts of the weight.
#pragma once

#include <algorithm>
#include <vector>

#include "pace/kernels.h"
#include "pace/row_ops.h"
#include "pace/types.h"

namespace pace {

class Product {
  public:
    // Rows of inputs, `stride` bytes apart: prepared rows, or rows of x if no preparation is needed.
    struct Inputs {
        const void* rows;
        int64_t stride, count;
    };

    // Reads how `weight` is stored. Throws std::invalid_argument for another table's layout, or for an order of columns
    // with a weight that is not quantised. A repeated call with the same weight and table does nothing.
    void describe(const void* weight, bool has_order);

    int64_t k = 0, n_out = 0, panels = 0;
    bool glu = false;
    bool takes_floats = false;  // x needs no conversion
    int64_t input_bytes = 0;    // size of a prepared row
    const KernelTable* table = nullptr;

    // The first byte of a panel of `weight`, which is stored like the described one.
    const char* panel(const void* weight, int64_t panel) const;
    // Fetches what run() reads of `weight` before its panels.
    void fetch_header(const void* weight) const;

    // Prepares a row of x [k] for all parts. It is normalised, put into the order [k] of the weight's columns (null:
    // unchanged), and rounded or quantised. Uses the thread's scratch.
    void prepare_row(const float* x, const Norm& norm, const int32_t* order, char* out) const;

    // Multiplies by panels [first_panel, end_panel) of `weight`, which is stored like the described one. Calls
    // finish(first_column, columns, args) for each range of outputs; only the fields of `args` about sums are set. A
    // range is complete. For a glu weight it has gate and up, and first_panel and end_panel are even.
    //
    // `sums` has room for count x (end_panel - first_panel) x 16 floats.
    template <class Finish>
    void run(const void* weight, const Inputs& x, int64_t first_panel, int64_t end_panel, float* sums,
             const Finish& finish) const {
        const int64_t stride = (end_panel - first_panel) * kPanelRows;
        EpilogueArgs e = {};
        e.sums = sums;
        e.sums_stride = stride;
        e.rows = x.count;
        e.glu = glu;
        if (glu) {  // panels of gate and up alternate if they are one part; else each part's panels are contiguous
            const int64_t first_column = first_panel / 2 * kPanelRows;
            const bool in_turns = parts_.size() == 1;
            e.panel_stride = in_turns ? 2 * kPanelRows : kPanelRows;
            e.up_offset = in_turns ? kPanelRows : stride / 2;
            if (in_turns) {
                multiply(parts_[0], weight, x, first_panel, end_panel - first_panel, sums, stride);
            } else {
                for (size_t half = 0; half < 2; ++half)
                    multiply(parts_[half], weight, x, first_panel / 2, (end_panel - first_panel) / 2,
                             sums + half * stride / 2, stride);
            }
            return finish(first_column, std::min(stride / 2, n_out - first_column), e);
        }
        e.panel_stride = kPanelRows;
        for (const Part& part : parts_) {
            const int64_t first = std::max<int64_t>(0, first_panel - part.first_panel),
                          end = std::min(part.panels, end_panel - part.first_panel);
            if (first >= end) continue;
            multiply(part, weight, x, first, end - first, sums, stride);
            finish(part.first_row + first * kPanelRows,
                   std::min((end - first) * kPanelRows, part.rows - first * kPanelRows), e);
        }
    }

  private:
    // One form of prepared inputs, shared by the parts of the weight that need it.
    struct InputKind {
        const PackedHeader* header;  // the first such part
        bool rounds, quantizes;      // rounds to bf16; quantises to codes; else fp32
        int64_t offset;              // offset in a prepared row, in bytes
        bool serves(const PackedHeader& other) const;
    };
    struct Part {
        int64_t offset;  // offset of its header in the weight
        int64_t rows, panels, first_panel, first_row;
        int input;  // index into `kinds_`
    };
    std::vector<Part> parts_;
    std::vector<InputKind> kinds_;
    const void* described_ = nullptr;
    bool has_order_ = false;

    void add_part(const void* weight, const PackedHeader& part, bool has_order);
    void multiply(const Part& part, const void* weight, const Inputs& x, int64_t first_panel, int64_t panel_count,
                  float* sums, int64_t sums_stride) const;
};

}  // namespace pace
