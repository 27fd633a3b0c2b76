// Lists the kernel tables, and selects the one in use.
#pragma once

#include <string>
#include <vector>

#include "pace/kernels.h"

namespace pace {

// Changes the table in use. Throws std::invalid_argument if the name is unknown, or if this CPU or this build lacks the
// table. Packed weights carry the layout of the table they were packed for; a table with a different layout refuses
// them.
void select_isa(const std::string& name);

// Tables in this build, best first; those for tests come last.
std::vector<std::string> built_isas();

// Tables in this build that this CPU can run.
std::vector<std::string> available_isas();

// The best table that this CPU can run, even if this build lacks it.
const char* best_isa();

}  // namespace pace
