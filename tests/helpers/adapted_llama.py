"""Tiny Llama with LoRA adapters, whose base is in a folder, and texts that it classifies."""

from __future__ import annotations

from typing import Any

import torch

WORDS = ("good", "great", "bad", "dull", "the", "plot", "is", "really", "film")


def write_base(folder: str, seed: int = 5) -> None:
    """Write a Llama with random weights as ``save_pretrained`` does."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(seed)
    LlamaForSequenceClassification(
        LlamaConfig(
            **{"vocab_size": len(WORDS) + 1, "pad_token_id": 0, "num_labels": 2},
            **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
            **{"num_attention_heads": 2, "max_position_embeddings": 32},
        )
    ).save_pretrained(folder)


def adapted(folder: str) -> torch.nn.Module:
    """Return the Llama of a folder with adapters; these and the head train."""
    from transformers import LlamaForSequenceClassification

    return _with_adapters(LlamaForSequenceClassification.from_pretrained(folder))


def adapted_without_base(folder: str) -> torch.nn.Module:
    """Return the same without the weights of the folder."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    return _with_adapters(LlamaForSequenceClassification(LlamaConfig.from_pretrained(folder)))


def _with_adapters(base: Any) -> torch.nn.Module:
    from peft import LoraConfig, TaskType, get_peft_model

    torch.manual_seed(7)
    config = LoraConfig(task_type=TaskType.SEQ_CLS, r=2, target_modules=["q_proj", "v_proj"])
    made: torch.nn.Module = get_peft_model(base, config)
    return made


def tokenized(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return a batch of texts, padded to the longest."""
    ids = [[WORDS.index(word) + 1 for word in row["text"].split()] for row in rows]
    width = max(map(len, ids))
    batch = {
        "input_ids": torch.tensor([[*each, *[0] * (width - len(each))] for each in ids]),
        "attention_mask": torch.tensor([[1] * len(e) + [0] * (width - len(e)) for e in ids]),
    }
    if "label" in rows[0]:
        batch["label"] = torch.tensor([row["label"] for row in rows])
    return batch


def texts(count: int) -> list[dict[str, Any]]:
    """Return rows of text and label."""
    rows = []
    for row in range(count):
        word = WORDS[row % 4]
        filler = " ".join(WORDS[4 + (row + n) % 5] for n in range(row % 3))
        rows.append({"text": f"{filler} {word}".strip(), "label": int(word in WORDS[:2])})
    return rows


def params(folder: str) -> dict[str, Any]:
    """Return params of an estimator that trains the adapters."""
    return {
        **{"model": adapted_without_base, "model_args": {"folder": folder}},
        **{"only_trainable": True, "init_weights": folder},
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, 0.02),
        "loss": torch.nn.functional.cross_entropy,
        **{"input_form": "keyword", "outputs": ["logits"], "collate_fn": tokenized},
        **{"feature_cols": ["text"], "label_cols": ["label"], "gradient_clip_norm": 0.5},
        **{"batch_size": 4, "epochs": 2, "random_seed": 3, "verbose": 0, "shuffle": False},
        "scale_learning_rate": False,
    }
