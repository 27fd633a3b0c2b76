// Work that depends on data of the running step (see the contract in pace/ops.h). Rows choose experts by their
// contents, and the chunks that multiply look up these choices.
#include <algorithm>
#include <cstring>
#include <vector>

#include "check.h"
#include "pace/program.h"

using namespace pace;

namespace {

constexpr int64_t kExperts = 5, kWidth = 12, kTaskRows = 4, kRowsPerChunk = 3;

// The expert of a row: the index of its largest element, the lowest among equals. NaN is never larger.
int expert_of(const float* row) {
    int best = 0;
    for (int e = 1; e < kExperts; ++e) {
        if (row[e] > row[best]) best = e;
    }
    return best;
}

// y [rows][kWidth]: row r multiplied, element by element and then added up from the left, by the row of its expert.
//
//   phase 0   a chunk for several rows:  experts[r].
//   phase 1   one chunk:   rows sorted by expert; tasks of at most kTaskRows rows of one expert.
//   phase 2   a chunk for each task:   the task with its number, if there is one.
struct RoutedOp {
    static constexpr int kPhases = 3;
    const float* x;  // [rows][kWidth]
    int64_t rows;
    const float* experts;  // [kExperts][kWidth]
    float* y;

    // Every expert may have one last task that is not full; experts without rows have no tasks.
    void prepare(int) { most_tasks = rows / kTaskRows + std::min(kExperts, rows); }
    int64_t chunks(int phase) const {
        return phase == 0 ? divide_up(rows, kRowsPerChunk) : phase == 1 ? std::min<int64_t>(rows, 1) : most_tasks;
    }
    size_t workspace_bytes() const { return size_t(1 + 2 * rows + 3 * most_tasks) * sizeof(int32_t); }
    void set_workspace(void* memory) {
        task_count = static_cast<int32_t*>(memory);
        choice = task_count + 1;
        sorted = choice + rows;
        tasks = reinterpret_cast<Task*>(sorted + rows);
    }

    void run(int phase, int64_t chunk, int) const {
        if (phase == 0) return choose(chunk * kRowsPerChunk, std::min(rows, (chunk + 1) * kRowsPerChunk));
        if (phase == 1) return sort();
        if (chunk < *task_count) multiply(tasks[chunk]);
    }

  private:
    struct Task {
        int32_t expert, first, count;  // in `sorted`
    };
    int64_t most_tasks;
    int32_t *task_count, *choice, *sorted;
    Task* tasks;

    void choose(int64_t first, int64_t end) const {
        for (int64_t r = first; r < end; ++r) choice[r] = expert_of(x + r * kWidth);
    }

    void sort() const {
        int32_t placed = 0, count = 0;
        for (int32_t e = 0; e < kExperts; ++e) {
            const int32_t begin = placed;
            for (int32_t r = 0; r < rows; ++r) {
                if (choice[r] == e) sorted[placed++] = r;
            }
            for (int32_t first = begin; first < placed; first += kTaskRows)
                tasks[count++] = {e, first, std::min(int32_t(kTaskRows), placed - first)};
        }
        *task_count = count;
    }

    void multiply(const Task& task) const {
        for (int32_t i = task.first; i < task.first + task.count; ++i) {
            const float* const row = x + sorted[i] * kWidth;
            float sum = 0;
            for (int64_t k = 0; k < kWidth; ++k) {
                sum += row[k] * experts[task.expert * kWidth + k];
                y[sorted[i] * kWidth + k] = sum;
            }
        }
    }
};

struct Routed {
    const std::vector<float> experts = check::heavy_tailed(kExperts * kWidth, 1);
    Program program{{kWidth, kWidth}};

    // The routed op reads a value that the op before it computed, so the choice is unknown outside. The op after it
    // reads its result.
    Routed() {
        const Value doubled = {0, kWidth, true}, result = {1, kWidth, true};
        program.record<AddOp>("double", true, [=](AddOp& op, const Program::Frame& frame) {
            const float* const x = frame.step.angles->cos;  // this program has no rotation
            op = {x, x, kWidth, kWidth, frame.step.tokens, kWidth, frame.at(doubled), 0, 0};
        });
        program.record<RoutedOp>("routed", false, [=, this](RoutedOp& op, const Program::Frame& frame) {
            op.x = frame.at(doubled);
            op.rows = frame.step.tokens;
            op.experts = experts.data();
            op.y = frame.at(result);
        });
        program.gather_rows({Value::kLogits, kWidth, false}, {result, 0, kWidth});
    }

    std::vector<float> run(const std::vector<float>& x) {
        const int64_t rows = int64_t(x.size()) / kWidth;
        std::vector<float> y(x.size(), check::kPoison);
        std::vector<int64_t> all(static_cast<size_t>(rows));
        for (int64_t r = 0; r < rows; ++r) all[r] = r;
        Step step = {};
        step.tokens = step.logit_rows = rows;
        const Angles angles = {x.data(), nullptr};
        step.angles = &angles;
        step.rows = all.data();
        step.logits = y.data();
        program.run(step);
        return y;
    }

    // Computes row by row, without lists.
    std::vector<float> expected(const std::vector<float>& x) const {
        std::vector<float> y;
        for (size_t r = 0; r < x.size(); r += kWidth) {
            const int expert = expert_of(&x[r]);
            float sum = 0;
            for (int64_t k = 0; k < kWidth; ++k)
                y.push_back(sum += (x[r + k] + x[r + k]) * experts[expert * kWidth + k]);
        }
        return y;
    }
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// Rows in which number r chooses expert choice(r).
template <class Choice>
std::vector<float> rows_that_choose(int64_t rows, const Choice& choice) {
    std::vector<float> x = check::heavy_tailed(size_t(rows * kWidth), uint32_t(rows));
    for (int64_t r = 0; r < rows; ++r) x[size_t(r * kWidth + choice(r))] = 1000;
    return x;
}

}  // namespace

TEST(work_that_depends_on_data_gives_the_same_bits_with_any_threads) {
    ThreadPool& pool = ThreadPool::instance();
    const int before = pool.num_threads();
    Routed routed;
    for (int threads = 1; threads <= 8; ++threads) {
        pool.set_num_threads(threads);
        for (const int64_t rows : {0, 1, 2, 5, 37, 64}) {
            // The chunks and bounds are those of the first choice; the second and third run without prepare().
            for (const std::vector<float>& x : {rows_that_choose(rows, [](int64_t r) { return r % kExperts; }),
                                                rows_that_choose(rows, [](int64_t) { return 3; }),
                                                rows_that_choose(rows, [](int64_t r) { return r * r % kExperts; })})
                CHECK(same_bits(routed.run(x), routed.expected(x)));
        }
    }
    pool.set_num_threads(before);
}

TEST(a_row_does_not_depend_on_where_the_others_go) {
    Routed routed;
    const std::vector<float> all = rows_that_choose(40, [](int64_t r) { return r * 3 % kExperts; });
    const std::vector<float> together = routed.run(all);
    for (size_t r = 0; r < 40; ++r) {
        const std::vector<float> row(all.begin() + r * kWidth, all.begin() + (r + 1) * kWidth);
        const std::vector<float> alone = routed.run(row);
        CHECK(std::memcmp(alone.data(), &together[r * kWidth], kWidth * sizeof(float)) == 0);
    }
}

TEST(rows_of_nan_choose_too) {
    Routed routed;
    std::vector<float> x = rows_that_choose(9, [](int64_t r) { return r % kExperts; });
    std::fill(x.begin() + 4 * kWidth, x.begin() + 5 * kWidth, check::kPoison);
    const std::vector<float> y = routed.run(x), expected = routed.expected(x);
    CHECK(std::memcmp(y.data(), expected.data(), 4 * kWidth * sizeof(float)) == 0);
    CHECK(std::isnan(y[4 * kWidth]));
    CHECK(std::memcmp(&y[5 * kWidth], &expected[5 * kWidth], 4 * kWidth * sizeof(float)) == 0);
}
