// Checks of the slots that a step reads and writes.
#include <stdexcept>
#include <string>

#include "pace/state_ops.h"

namespace pace {

namespace {

[[noreturn]] void refuse(int64_t span, const std::string& what) {
    throw std::invalid_argument("span " + std::to_string(span) + ": " + what);
}

std::string numbered(int64_t slots) { return "; slots are numbered 0 to " + std::to_string(slots - 1); }

void check_marks(const StateSpans& spans, int64_t span, int64_t slots) {
    const int64_t begin = spans.mark_start[span], end = spans.mark_start[span + 1];
    if (begin > end || end > spans.marks) {
        refuse(span, "mark_start goes from " + std::to_string(begin) + " to " + std::to_string(end) +
                         "; it must not fall and must end at the " + std::to_string(spans.marks) + " marks");
    }
    int64_t least = 1;
    for (int64_t m = begin; m < end; ++m) {
        const int64_t row = spans.mark_rows[m], slot = spans.mark_slots[m];
        if (row < least || row > spans.certain[span]) {
            refuse(span, "a mark is after " + std::to_string(row) + " tokens; marks ascend, from 1 to the " +
                             std::to_string(spans.certain[span]) + " certain tokens");
        }
        if (slot < 0 || slot >= slots) {
            refuse(span, "a mark writes slot " + std::to_string(slot) + numbered(slots));
        }
        least = row;
    }
}

}  // namespace

void check_spans(const StateSpans& spans, int64_t tokens, int64_t slots, int64_t journal_rows) {
    if (spans.query_start[0] != 0 || spans.query_start[spans.count] != tokens) {
        throw std::invalid_argument("query_start must go from 0 to the " + std::to_string(tokens) +
                                    " tokens; it goes from " + std::to_string(spans.query_start[0]) + " to " +
                                    std::to_string(spans.query_start[spans.count]));
    }
    if (spans.mark_start[0] != 0 || spans.mark_start[spans.count] != spans.marks) {
        throw std::invalid_argument("mark_start must go from 0 to the " + std::to_string(spans.marks) +
                                    " marks; it goes from " + std::to_string(spans.mark_start[0]) + " to " +
                                    std::to_string(spans.mark_start[spans.count]));
    }
    for (int64_t span = 0; span < spans.count; ++span) {
        const int64_t begin = spans.query_start[span], end = spans.query_start[span + 1];
        const int64_t read = spans.read[span], write = spans.write[span];
        const int64_t replay = spans.replay[span], certain = spans.certain[span];
        if (begin > end || end > tokens) {
            refuse(span, "query_start goes from " + std::to_string(begin) + " to " + std::to_string(end) +
                             "; it must not fall and must end at the " + std::to_string(tokens) + " tokens");
        }
        if (read < -1 || read >= slots) {
            refuse(span, "it reads slot " + std::to_string(read) + numbered(slots) + ", and -1 reads zeros");
        }
        if (write < 0 || write >= slots) refuse(span, "it writes slot " + std::to_string(write) + numbered(slots));
        if (certain < 1 || certain > end - begin) {
            refuse(span, std::to_string(certain) + " tokens are certain; it must be 1 to its " +
                             std::to_string(end - begin) + " tokens");
        }
        if (replay < 0 || (read < 0 && replay > 0) || replay > journal_rows) {
            refuse(span, "it replays " + std::to_string(replay) + " rows of the journal of slot " +
                             std::to_string(read) + ", which has " + std::to_string(read < 0 ? 0 : journal_rows));
        }
        if (end - begin - certain > journal_rows) {
            refuse(span, "it has " + std::to_string(end - begin - certain) + " drafts; the journal has " +
                             std::to_string(journal_rows) + " rows");
        }
        check_marks(spans, span, slots);
    }
}

}  // namespace pace
