// LoRA adapters: two products of low rank, added to a product of the base model for the rows that are routed to them.
//
// A routing is fp32 [rows][2 k]: the slots of up to k adapters of each row, -1 for none, then their weights.
#pragma once

#include <cstdint>
#include <vector>

#include "pace/kernels.h"
#include "pace/row_ops.h"

namespace pace {

// The adapters of one product, by slot: AdapterTable of pace/ops/adapters. Its arrays change between two steps.
//
// The columns of the product are cut into parts, such as queries, keys and values. An adapter has matrices for some of
// them. A of all its parts is one weight, with the rows of one part below those of the part before it.
struct AdapterTable {
    // [slots][1 + 2 parts]: the address of A [ranks][K]; then for each part, of B [columns][rank] and of its bias. A and
    // B are packed weights, the bias is fp32 [columns]. 0: there is none.
    const int64_t* addresses;
    const float* scales;    // [slots][parts]
    const int64_t* starts;  // [parts + 1]: the first column of each part, and the end of the last one
    int64_t slots, parts, k, max_rank;
    DType dtype;  // of A and B

    const PackedHeader* a(int64_t slot) const { return reinterpret_cast<const PackedHeader*>(of(slot)[0]); }
    const PackedHeader* b(int64_t slot, int64_t part) const {
        return reinterpret_cast<const PackedHeader*>(of(slot)[1 + 2 * part]);
    }
    const float* bias(int64_t slot, int64_t part) const {
        return reinterpret_cast<const float*>(of(slot)[2 + 2 * part]);
    }
    float scale(int64_t slot, int64_t part) const { return scales[slot * parts + part]; }

  private:
    const int64_t* of(int64_t slot) const { return addresses + slot * (1 + 2 * parts); }
};

// csrc/ops/adapters.cpp. For each row, and each adapter e with weight w in its routing, in the order of the routing:
//
//   t = A_e norm(x)          y[columns of part p] += (w * scale_ep) * (B_ep t[ranks of part p] + bias_ep)
//
// Pairs of a row and an adapter are sorted by their place in the routing, then by slot. Pairs of one adapter are
// multiplied together, as blocks of rows:
//
//   kSort  one chunk:                   sort pairs, cut them into blocks. Every thread sorts a few pairs for itself.
//   kDown  blocks x panels of A:        t [pairs][ranks], in sorted order.
//   kUp    panels of columns of a part: all blocks in order, each row added to y.
//
// A row without an adapter is neither read nor written.
struct AddAdaptersOp {
    enum Phases : int { kSort, kDown, kUp, kPhases };
    AdapterTable adapters;
    Norm norm;       // of x
    const float* x;  // [rows][K], x_stride floats between rows
    int64_t x_stride, rows;
    const float* routing;    // [..][2 per_row]; null if no row has an adapter
    int64_t per_row;         // adapters of a row
    const int64_t* indices;  // [rows]: the routing of each row; null: row r has routing r
    float* y;                // [rows][columns], y_stride floats between rows
    int64_t y_stride;

    void prepare(int threads);  // throws std::invalid_argument for a weight of another table's layout
    int64_t chunks(int phase) const { return chunk_counts[phase]; }
    void run(int phase, int64_t chunk, int thread) const;

    size_t workspace_bytes() const;
    void set_workspace(void* memory);

  private:
    // Rows [first, first + count) of the sorted pairs, all for one adapter.
    struct Block {
        int32_t slot, first, count;
    };
    // Addresses in one copy of the sorted pairs: shared, or one thread's own.
    struct Copy {
        int32_t* block_count;
        Block* blocks;
        int32_t* row_of;  // [pairs]
        float* weight;    // [pairs]
    };
    struct Cut {
        int64_t part, first_panel, end_panel;
    };

    const KernelTable* table = nullptr;
    int64_t chunk_counts[kPhases];
    int64_t pairs, max_blocks, max_panels, ranks;  // `ranks`: width of t
    int threads = 0;
    bool per_thread;  // every thread sorts for itself
    std::vector<Cut> cuts;
    char* workspace;
    mutable std::vector<char> sorted;  // by thread, if per_thread

    size_t copy_bytes() const;
    float* sums_of(int64_t pair) const { return reinterpret_cast<float*>(workspace) + pair * ranks; }
    Copy copy_of(int thread) const;
    Copy ready(int thread) const;
    void check_layouts() const;
    void cut_columns();
    void sort(const Copy& copy) const;
    void multiply_down(const Copy& copy, const Block& block, int64_t first_panel, int64_t end_panel) const;
    void multiply_up(const Copy& copy, const Block& block, const Cut& cut) const;
};

}  // namespace pace
