"""Language understanding tasks: GPT-2 base, diagonal Laplace posterior over the MLPs of its last four blocks."""

from __future__ import annotations

TABLE = "tab:gpt"

# metric -> method -> task -> (value, standard error); the paper gives no errors of the ECE
RESULTS: dict[str, dict[str, dict[str, tuple[float, float | None]]]] = {
    "accuracy": {
        "sampling": {"boolq": (0.606, 0.009), "wic": (0.511, 0.020), "mrpc": (0.665, 0.011)},
        "GLM": {"boolq": (0.678, 0.008), "wic": (0.630, 0.019), "mrpc": (0.720, 0.011)},
        "ours": {"boolq": (0.622, 0.008), "wic": (0.500, 0.020), "mrpc": (0.416, 0.012)},
    },
    "nlpd": {
        "sampling": {"boolq": (0.656, 0.006), "wic": (0.716, 0.008), "mrpc": (0.658, 0.012)},
        "GLM": {"boolq": (0.633, 0.013), "wic": (0.695, 0.022), "mrpc": (0.609, 0.021)},
        "ours": {"boolq": (0.665, 0.005), "wic": (0.694, 0.002), "mrpc": (0.706, 0.001)},
    },
    "ece": {
        "sampling": {"boolq": (0.030, None), "wic": (0.097, None), "mrpc": (0.080, None)},
        "GLM": {"boolq": (0.090, None), "wic": (0.117, None), "mrpc": (0.111, None)},
        "ours": {"boolq": (0.027, None), "wic": (0.024, None), "mrpc": (0.109, None)},
    },
}

PROMPT_TABLE = "table:gpt_prompt"
PROMPTS = {
    "mrpc": "Answer whether sentence 2 is equivalent to sentence 1. "
    "Sentence 1: {sentence1}. Sentence 2: {sentence2}. Answer:",
    "wic": "Select whether word {word} has the same meaning in these two sentences. "
    "Sentence 1: {sentence1}. Sentence 2: {sentence2}. Answer:",
    "boolq": "Answer the question with only True or False. Passage: {passage}. Question: {question}. Answer:",
}
