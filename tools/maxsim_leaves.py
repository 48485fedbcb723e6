"""The functions of the patched libraries that compute a MaxSim, as maxsim_sentinel.py finds them.

By its name below the package, each has the reason why no patch reaches it, or PATCHED and what a patch
replaces to reach it, as `late_interaction.patched()` names that. PATCHED alone: the function itself.
"""

PATCHED = "patched "

_SOURCE = "no module that is imported: Transformers makes one from it"
_EXPERTS = "no MaxSim: a mixture of experts takes the best by their keys"
_STANFORD = "of StanfordPLAID (use_fast=False), whose searches are its own C++ but for this last step"

LEAVES = {
    "sentence-transformers": {
        "multi_vector_encoder.scoring.xtr.xtr_scores": PATCHED,
        "util.similarity._maxsim_score_documents": PATCHED,
        "util.similarity._maxsim_score_pairs": PATCHED,
    },
    "transformers": {
        "models.colmodernvbert.modular_colmodernvbert.ColModernVBertProcessor.score_retrieval": _SOURCE,
        "models.colmodernvbert.processing_colmodernvbert.ColModernVBertProcessor.score_retrieval": PATCHED,
        "models.colpali.modular_colpali.ColPaliProcessor.score_retrieval": _SOURCE,
        "models.colpali.processing_colpali.ColPaliProcessor.score_retrieval": PATCHED,
        "models.colqwen2.processing_colqwen2.ColQwen2Processor.score_retrieval": PATCHED,
        "models.doge.modeling_doge.DogeCDMoE.forward": _EXPERTS,
        "models.doge.modular_doge.DogeCDMoE.forward": _EXPERTS,
    },
    "pylate": {
        "indexes.stanford_nlp.modeling.colbert.colbert_score": _STANFORD,
        "indexes.stanford_nlp.modeling.colbert.colbert_score_packed": _STANFORD,
        **{
            f"scores.colbert.{name}": f"{PATCHED}pylate.scores._lik_backend.{name}_lik"
            for name in ("colbert_kd_scores", "colbert_scores", "colbert_scores_pairwise")
        },
        "scores.xtr.XTRScores._score": PATCHED,
    },
    "colpali-engine": {
        "loss.late_interaction_losses.ColbertModule._inbatch_scores": PATCHED,
        "loss.late_interaction_losses.ColbertNegativeCELoss.forward": PATCHED,
        "loss.late_interaction_losses.ColbertPairwiseNegativeCELoss.forward": PATCHED,
        "utils.maxsim._torch_maxsim": PATCHED + "colpali_engine.utils._lik_backend.maxsim_inbatch_lik",
        "utils.maxsim._torch_maxsim_kd": PATCHED + "colpali_engine.utils._lik_backend.maxsim_kd_lik",
    },
    "mteb": {
        "models.model_implementations.jina_models.JinaV4Wrapper.score_multi_vector": PATCHED,
        "models.openai_wrappers._max_sim_scores": PATCHED,
        "similarity_functions._max_sim_ragged_core": PATCHED + "mteb.similarity_functions.max_sim",
        "similarity_functions.max_sim._max_sim_core": PATCHED + "mteb.similarity_functions.max_sim",
        "similarity_functions.pairwise_max_sim": PATCHED,
    },
    "vllm": {
        "entrypoints.pooling.scoring.utils.compute_maxsim_score": PATCHED,
        "v1.pool.flash_maxsim.flash_maxsim_rerank._maxsim_rerank_kernel": (
            PATCHED + "vllm.v1.pool.late_interaction_runner.LateInteractionRunner._score"
        ),
        "v1.pool.late_interaction.compute_maxsim_score_batched": PATCHED,
    },
}
