#include "../fp32_3xfp16.cuh"
#include "../launch.cuh"

namespace late_interaction {

namespace {

// Both maps are [2, items, tokens, width]. The documents of all queries are contiguous.
TensorMaps make_fp16x2_maps(const ForwardArgs& p, const Fp16x2Tokens& x, int tokens_of_tile) {
  constexpr int kBoxRows = 64;
  const int64_t rows = int64_t{p.Nq} * p.Lq, documents = documents_of(p), w = x.width;
  const bool in_batch = p.layout == Layout::in_batch;
  const TmaAxis tokens{in_batch ? rows : p.Lq, w}, queries{in_batch ? 1 : p.Nq, p.Lq * w};
  TensorMaps maps{};
  maps.Q = make_token_map(x.Q, Compute::fp16, w, tokens, queries, {2, rows * w}, kBoxRows);
  maps.D = make_token_map(x.D, Compute::fp16, w, {p.Ld, w}, {documents, p.Ld * w}, {2, documents * p.Ld * w},
                          tokens_of_tile);
  return maps;
}

cudaError_t launch_sm90_3xfp16(const ForwardLaunch<ForwardArgs>& call) {
  const TensorMaps maps = make_fp16x2_maps(call.args, *call.fp16x2, call.plan.tokens);
  const auto launch_tile = [&]<int kTokens, bool kWinners, bool /*kMaskedOrScaled: always*/>() {
    using Tile = Sm90By3xFp16Tile<kTokens, kWinners>;
    return launch_clusters(maxsim_forward_sm90_3xfp16<Tile>, Tile::kThreads, call, maps);
  };
  return choose_longd_tile<WgmmaOperand<Compute::fp16>>(call, launch_tile);
}

const ForwardInstance<> kInstance(sm90_3xfp16, Compute::fp16, launch_sm90_3xfp16);

}  // namespace

}  // namespace late_interaction
