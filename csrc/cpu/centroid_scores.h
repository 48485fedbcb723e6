#pragma once

#include <cstdint>

namespace late_interaction::cpu {

// Scores of documents by their centroids alone: the sum over query tokens of the largest similarity that a
// token's centroid has. A code that is out of range counts as 0; a document without tokens scores 0.
struct CentroidScoresCall {
  const void* table = nullptr;  // [centroids, Lq] float, or double if fp64: similarities
  bool fp64 = false;
  int64_t centroids = 0, Lq = 0;
  const int32_t* codes = nullptr;  // [documents, room]
  int64_t documents = 0, room = 0;
  const int64_t* lengths = nullptr;  // [documents]
  void* scores = nullptr;            // [documents], as the table
};

void centroid_scores(const CentroidScoresCall& call);

}  // namespace late_interaction::cpu
