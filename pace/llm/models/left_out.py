"""Causal language models of transformers that are not implemented, with the reasons that errors give."""

from __future__ import annotations

LEFT_OUT: dict[str, tuple[str, ...]] = {
    "its layers keep states of another kind than Mamba-2 and the delta rule": (
        "FalconMambaForCausalLM", "JambaForCausalLM", "MambaForCausalLM", "MiniMaxForCausalLM",
        "RecurrentGemmaForCausalLM", "RwkvForCausalLM", "ZambaForCausalLM", "Zamba2ForCausalLM", "ZayaForCausalLM",
        "xLSTMForCausalLM",
    ),
    "its attention chooses or combines positions in another way": (
        "AXK2ForCausalLM", "DeepseekV4ForCausalLM", "DiffLlamaForCausalLM", "DogeForCausalLM", "Dots3NoteForCausalLM",
        "HYV4ForCausalLM", "InklingForCausalLM", "Inkling2ForCausalLM", "Inkling2LoopForCausalLM",
        "JetMoeForCausalLM", "MiniMaxM3VLForCausalLM", "Qwen4ExpForCausalLM",
    ),
    "it runs layers several times, or adds to more than one residual stream": (
        "BltForCausalLM", "DoryForCausalLM", "Gemma3nForCausalLM", "Gemma3nForConditionalGeneration",
        "HrmTextForCausalLM",
    ),
    "its residuals, gates or experts need operations that no other family has": (
        "BeamForCausalLM", "LongcatFlashForCausalLM", "MiMoV2FlashForCausalLM",
    ),
    "it has no text model separate from its images or sound": (
        "AriaTextForCausalLM", "CohereCompassForCausalLM", "Emu3ForCausalLM", "FuyuForCausalLM", "GitForCausalLM",
        "GotOcr2ForConditionalGeneration", "MllamaForCausalLM", "MoshiForCausalLM",
        "MossTranscribeDiarizeForConditionalGeneration", "MusicgenForCausalLM", "MusicgenMelodyForCausalLM",
        "Phi4MultimodalForCausalLM", "TrOCRForCausalLM", "WhisperForCausalLM",
    ),
    "it is an encoder, or the decoder of a model with an encoder": (
        "BartForCausalLM", "BertLMHeadModel", "BertGenerationDecoder", "BigBirdForCausalLM",
        "BigBirdPegasusForCausalLM", "BlenderbotForCausalLM", "BlenderbotSmallForCausalLM", "CamembertForCausalLM",
        "Data2VecTextForCausalLM", "ElectraForCausalLM", "ErnieForCausalLM", "MBartForCausalLM", "MarianForCausalLM",
        "MegatronBertForCausalLM", "MvpForCausalLM", "PLBartForCausalLM", "PegasusForCausalLM",
        "ProphetNetForCausalLM", "RemBertForCausalLM", "RoCBertForCausalLM", "RoFormerForCausalLM",
        "RobertaForCausalLM", "RobertaPreLayerNormForCausalLM", "XLMRobertaForCausalLM", "XLMRobertaXLForCausalLM",
        "XLMWithLMHeadModel", "XmodForCausalLM",
    ),
    "it is an early model, of a form that later ones do not share": (
        "BioGptForCausalLM", "CTRLLMHeadModel", "CpmAntForCausalLM", "GPTNeoForCausalLM", "GPTNeoXJapaneseForCausalLM",
        "OpenAIGPTLMHeadModel", "ReformerModelWithLMHead", "XGLMForCausalLM", "XLNetLMHeadModel",
    ),
}  # fmt: skip
"""Reason -> names in `architectures`."""


def reason_of(architecture: str) -> str | None:
    """Why an architecture is not implemented, as the end of a sentence; None for an unknown one."""
    return next((reason for reason, names in LEFT_OUT.items() if architecture in names), None)
