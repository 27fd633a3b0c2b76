// LoRA adapters: two products of low rank, added to a product of the base model for the rows that are routed to them.
//
// A routing is fp32 [rows][2 k]: the slots of up to k adapters of each row, -1 for none, then their weights.
#pragma once

#include <cstdint>
#include <vector>

#include "pace/kernels.h"
#include "pace/ops.h"
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

// What the adapters of a product add to it. For each row, and each adapter e with weight w in its routing, in the order
// of the routing:
//
//   t = A_e norm(x)          y[columns of part p] += (w * scale_ep) * (B_ep t[ranks of part p] + bias_ep)
//
// Pairs of a row and an adapter are sorted by their place in the routing, then by slot. Pairs of one adapter are
// multiplied together, as blocks of rows:
//
//   sort   one chunk:                sort pairs, cut them into blocks. Every thread sorts a few pairs for itself.
//   down   blocks x panels of A:     t [pairs][ranks], in sorted order. Every thread computes it for a single pair.
//   add    some rows, some columns:  all blocks in order, each row added to y.
//
// A row without an adapter is neither read nor written.
class AdapterProducts {
  public:
    AdapterTable adapters;
    Norm norm;       // of x
    const float* x;  // [rows][K], x_stride floats between rows
    int64_t x_stride, rows;
    const float* routing;    // [..][2 per_row]; null if no row has an adapter
    int64_t per_row;         // adapters of a row
    const int64_t* indices;  // [rows]: the routing of each row; null: row r has routing r

    void prepare(int thread_count);  // throws std::invalid_argument for a weight of another table's layout
    size_t workspace_bytes() const;
    void set_workspace(void* memory);

    // Chunks of the first two steps. `down` begins after `sort`, and `add` after `down`.
    int64_t sort_chunks() const { return pairs > 0 && !per_thread ? 1 : 0; }
    int64_t down_chunks() const;
    void sort(int thread) const { sort(copy_of(thread)); }
    void down(int64_t chunk, int thread) const;

    // Does what is left to each thread, before it adds. Uses the thread's scratch.
    void make_ready(int thread) const { ready(thread); }
    // True if one of the rows has an adapter here.
    bool any(int thread, int64_t first_row, int64_t count) const;
    // Adds to `count` rows and some columns; y points to the first. `scratch` has add_bytes(count, columns).
    void add(int thread, int64_t first_row, int64_t count, int64_t first_column, int64_t columns, float* y,
             int64_t y_stride, void* scratch) const;
    size_t add_bytes(int64_t count, int64_t columns) const;

  protected:
    const KernelTable* table = nullptr;
    int threads = 0;
    int64_t pairs;

  private:
    // Rows [first, first + count) of the sorted pairs, all for one adapter.
    struct Block {
        int32_t slot, first, count;
    };
    // Addresses in one copy of the sorted pairs: shared, or one thread's own.
    struct Copy {
        float* t;  // [pairs][ranks]; shared, unless there is a single pair
        int32_t* block_count;
        Block* blocks;
        int32_t* row_of;  // [pairs]
        float* weight;    // [pairs]
    };
    // Pairs [first, end) of a block.
    struct Pairs {
        int32_t first, end;
    };
    // Columns [first, end) of a part of y.
    struct Range {
        int64_t part, first, end;
    };

    int64_t max_blocks, max_panels, ranks;  // `ranks`: width of t
    bool per_thread;                        // every thread sorts for itself
    char* workspace;
    mutable std::vector<char> sorted;  // by thread, if per_thread

    bool alone() const { return pairs == 1; }  // every thread computes t for itself
    size_t t_bytes() const;
    size_t copy_bytes() const;
    Copy copy_of(int thread) const;
    Copy ready(int thread) const;
    void check_layouts() const;
    void sort(const Copy& copy) const;
    static Pairs pairs_of(const Copy& copy, const Block& block, int64_t first_row, int64_t end_row);
    void multiply_down(const Copy& copy, const Block& block, int64_t first_panel, int64_t end_panel) const;
    void add_part(const Copy& copy, int32_t slot, const Pairs& some, const Range& range, int64_t first_row, float* y,
                  int64_t y_stride, char* scratch) const;
};

// y += the products of the adapters, as chunks of columns.
struct AddAdaptersOp : AdapterProducts {
    enum Phases : int { kSort, kDown, kUp, kPhases };
    float* y;  // [rows][columns], y_stride floats between rows
    int64_t y_stride;

    void prepare(int thread_count);
    int64_t chunks(int phase) const {
        return phase == kSort ? sort_chunks() : phase == kDown ? down_chunks() : pairs > 0 ? int64_t(cuts.size()) : 0;
    }
    void run(int phase, int64_t chunk, int thread) const;

  private:
    struct Cut {
        int64_t first, count;  // columns
    };
    std::vector<Cut> cuts;
    int cut_for = 0;  // threads
};

// A product whose rows have adapters: LinearOp, and what adapters add before the activation, while sums are in cache.
// The residual comes first. A glu weight has the parts gate and up.
struct AdaptedLinearOp {
    enum Phases : int { kInputs, kDown, kProduct, kPhases };
    LinearOp linear;
    AdapterProducts adapters;  // its x and norm are those of `linear`

    void prepare(int thread_count);
    int64_t chunks(int phase) const;
    void run(int phase, int64_t chunk, int thread) const;

    size_t workspace_bytes() const;
    void set_workspace(void* memory);

  private:
    struct Shape {
        int64_t rows = -1;
        int threads = 0;
        const KernelTable* table = nullptr;
        const void* weight = nullptr;
        bool operator==(const Shape&) const = default;
    };
    Shape prepared;  // what `linear` was prepared for

    bool is_early() const { return adapters.sort_chunks() == 0; }  // down needs no sort of its own
};

}  // namespace pace
