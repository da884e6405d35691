// What screened output layers share with their kernels: a coarse scan of all rows, whose bounds tell
// which few need their exact scores. Part of the contract, as kernels.h.
#pragma once

#include <cstdint>

namespace blockgate {

// A coarse scan of an output layer, in panels of PANEL rows: bounds of all scores from a few bits of
// each weight, stored as codes of 4 bits.
struct ScreenRows {
  int64_t groups;        // of SCREEN_GROUP inputs
  const uint8_t* codes;  // [panel][group][SCREEN_GROUP / 8][row][4]: inputs 8j + i low, 8j + 4 + i high
  const uint8_t* steps;  // [panel][group][row]: steps of a group's codes, in units of their row
  const float* rows;     // [panel][4][row]: unit; norms of what codes miss and of what they hold; bias
};
static constexpr int64_t SCREEN_GROUP = 32;
static constexpr int64_t SCREEN_ROW_VALUES = 4;

// One token's inputs for that scan, padded with zeros to whole groups.
struct ScreenInput {
  int8_t* steps;     // [group][SCREEN_GROUP]
  float* sizes;      // of the steps, by group
  int32_t* offsets;  // what codes from 0 to 15 add too much, as int16 for inputs 0, 1 and 2, 3 of four
  double* exact;     // the inputs themselves, padded to EXACT_LANES
};

// Norms of the inputs and of what their steps miss; false: NaN or inf among them.
struct ScreenNorms {
  double input, missed;
  bool finite;
};

// How far a score may be from its scan: for each row the factors of the norms of what its codes miss and
// hold, of its |bias|, and what is added to all.
struct ScreenSlack {
  float missed, held, bias, rest;
};

// Scores that may reach this size are not bounded: they could overflow.
static constexpr float SCREEN_LARGEST = 1e38f;

struct ScreenBounds {
  float *lower, *upper;              // by row, padded to whole panels
  float *panel_lower, *panel_upper;  // the largest of each panel
};

// An exact score is a sum in double of so many partial sums, input k in number k % EXACT_LANES, which
// are then added in halves; plus the bias, rounded to float.
static constexpr int64_t EXACT_LANES = 16;

}  // namespace blockgate
