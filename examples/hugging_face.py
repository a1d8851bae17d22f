"""Fine-tune three models of Hugging Face's transformers on a DataFrame of texts.

``--task classification`` trains LoRA adapters (package ``peft``) of a BERT that classifies reviews.
``--task tokens`` trains a BERT that marks names in sentences; padding and parts of words have no
label. ``--task generation`` trains a T5 that writes the words of a sentence in reverse order, and
its ``transform()`` generates text.

The tokenizer works in ``collate_fn``, so a batch is as long as its longest text. The program makes
tiny models with random weights and a tokenizer of its own. For pretrained ones, replace the
function ``tokenizer_of`` and the config by ``AutoTokenizer.from_pretrained(name)`` and
``AutoModel….from_pretrained(name)``. Only the driver downloads them.

Run it with ``python examples/hugging_face.py``; see ``--help`` for options.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from common import make_parser, start_spark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from hvd_estimators import Store
from hvd_estimators.torch import TorchEstimator, TorchModel, load_predictor

GOOD, BAD = ("good", "great", "moving", "funny"), ("bad", "dull", "slow", "empty")
FILLERS = ("the", "plot", "is", "a", "film", "and", "really", "actors", "are", "music", "of", "it")
NAMES = ("ada", "grace", "alan", "edsger", "barbara", "donald")
WORDS = (*GOOD, *BAD, *FILLERS, *NAMES)
IGNORED = -100
"""Label of tokens that do not count in the loss."""


def tokenizer_of(words: Iterable[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word."""
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[EOS]", "[UNK]", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]"
    )


TOKENIZER = tokenizer_of(WORDS)


def sentences(count: int, seed: int) -> list[list[str]]:
    """Return sentences of 3 to 12 words; each has one good or bad word, and some have names."""
    chosen = random.Random(seed)
    made = []
    for _ in range(count):
        words = chosen.choices((*FILLERS, *NAMES), k=chosen.randint(2, 11))
        words.insert(chosen.randrange(len(words) + 1), chosen.choice((*GOOD, *BAD)))
        made.append(words)
    return made


def frame(spark: SparkSession, rows: int, seed: int) -> DataFrame:
    """Return texts, whether they are good, whether each word is a name, and the reversed text."""
    return spark.createDataFrame(
        [
            (
                " ".join(words),
                int(any(word in GOOD for word in words)),
                [int(word in NAMES) for word in words],
                " ".join(reversed(words)),
            )
            for words in sentences(rows, seed)
        ],
        "text string, is_good int, is_name array<int>, reversed string",
    )


# What the estimator sends to processes and saves with the model


def collate_reviews(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return token ids, mask and, in training, the class of each text."""
    batch = TOKENIZER([row["text"] for row in rows], padding=True, return_tensors="pt")
    made = {name: batch[name] for name in ("input_ids", "attention_mask")}
    if "is_good" in rows[0]:
        made["is_good"] = torch.tensor([row["is_good"] for row in rows])
    return made


def collate_names(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return token ids, mask and, in training, the label of each token."""
    texts = [row["text"].split() for row in rows]
    batch = TOKENIZER(texts, is_split_into_words=True, padding=True, return_tensors="pt")
    made = {name: batch[name] for name in ("input_ids", "attention_mask")}
    if "is_name" in rows[0]:
        labels = torch.full(batch["input_ids"].shape, IGNORED)
        for row, tokens in enumerate(labels):
            word_of_token = batch.word_ids(row)
            for position, word in enumerate(word_of_token):
                # Only the first token of a word has a label.
                if word is not None and word not in word_of_token[:position]:
                    tokens[position] = int(rows[row]["is_name"][word])
        made["is_name"] = labels
    return made


def collate_pairs(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the tokens of texts and, in training, of the texts to write."""
    texts = _with_ending([row["text"] for row in rows])
    made = {name: texts[name] for name in ("input_ids", "attention_mask")}
    if "reversed" in rows[0]:
        written = _with_ending([row["reversed"] for row in rows])
        ids, is_word = written["input_ids"], written["attention_mask"] == 1
        # The model writes each word after it has read those before.
        made["decoder_input_ids"] = torch.nn.functional.pad(ids[:, :-1], (1, 0))
        made["reversed"] = ids.masked_fill(~is_word, IGNORED)
    return made


def _with_ending(texts: list[str]) -> Any:
    texts = [f"{text} {TOKENIZER.eos_token}" for text in texts]
    return TOKENIZER(texts, padding=True, return_tensors="pt")


class Marker(torch.nn.Module):
    """Model of token classes, whose scores have the classes second, as `CrossEntropyLoss` wants."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return scores of shape (rows, classes, tokens)."""
        scores = self.net(input_ids=input_ids, attention_mask=attention_mask).logits
        return scores.transpose(1, 2)


class Writer(torch.nn.Module):
    """Model that returns scores of the text to write in training, and generates otherwise.

    Parameters
    ----------
    net : T5ForConditionalGeneration
        The model.
    length : int
        Tokens of each generated text; shorter texts are padded.
    """

    def __init__(self, net: torch.nn.Module, length: int) -> None:
        super().__init__()
        self.net, self.length = net, length

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        decoder_input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return scores of shape (rows, words, tokens), or token ids of shape (rows, length)."""
        texts = {"input_ids": input_ids, "attention_mask": attention_mask}
        if decoder_input_ids is not None:
            scores = self.net(**texts, decoder_input_ids=decoder_input_ids).logits
            return scores.transpose(1, 2)
        made = self.net.generate(**texts, max_new_tokens=self.length)[:, 1:]
        missing = self.length - made.shape[1]
        return torch.nn.functional.pad(made, (0, missing), value=TOKENIZER.pad_token_id)


def bert(kind: Any, **options: Any) -> Any:
    """Return a tiny BERT with random weights."""
    return kind(
        BertConfig(
            vocab_size=len(TOKENIZER),
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=32,
            **options,
        )
    )


def with_adapters(net: torch.nn.Module) -> torch.nn.Module:
    """Return the model with LoRA adapters: the base is frozen; adapters and classifier train."""
    from peft import LoraConfig, TaskType, get_peft_model

    config = LoraConfig(
        task_type=TaskType.SEQ_CLS, r=8, lora_alpha=32, target_modules=["query", "value"]
    )
    adapted: torch.nn.Module = get_peft_model(net, config)
    return adapted


def trained(net: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters that train."""
    return [parameter for parameter in net.parameters() if parameter.requires_grad]


# The three tasks


def common_params(args: argparse.Namespace, net: torch.nn.Module) -> dict[str, Any]:
    """Return the params that all tasks share."""
    return {
        "num_proc": args.num_proc,
        "store": Store.create(str(args.output / "store")),
        "model": net,
        "optimizer": torch.optim.AdamW(trained(net), lr=args.learning_rate),
        "loss": torch.nn.CrossEntropyLoss(ignore_index=IGNORED),
        "feature_cols": ["text"],
        "input_form": "keyword",  # net(input_ids=..., attention_mask=...)
        "batch_size": args.batch_size,
        "epochs": args.epochs,
        "gradient_clip_norm": 1.0,
        "scale_learning_rate": False,
        "random_seed": args.seed,
    }


def classify(spark: SparkSession, args: argparse.Namespace) -> float:
    """Fine-tune adapters of a classifier, and predict the class of new texts."""
    net = with_adapters(bert(BertForSequenceClassification, num_labels=2))
    estimator = TorchEstimator(
        **common_params(args, net),
        collate_fn=collate_reviews,
        label_cols=["is_good"],
        outputs=["logits"],
    )
    model = estimator.fit(frame(spark, args.texts, seed=1))
    held_out = frame(spark, 200, seed=2)
    predicted = model.transform(held_out)
    right = predicted.where(F.col("prediction") == F.col("is_good")).count()
    few, total = (sum(p.numel() for p in each) for each in (trained(net), net.parameters()))
    print(f"{few:,} of {total:,} parameters train")
    print(f"Texts of the right class: {right / 200:.3f}")
    serve(model, args)
    return right / 200


def serve(model: TorchModel, args: argparse.Namespace) -> None:
    """Save the model, and predict as a process without Spark does."""
    path = str(args.output / "reviews")
    model.write().overwrite().save(path)
    predictor = load_predictor(path)
    for text in ("a moving film", "the plot is dull and the music is bad"):
        (row,) = predictor.predict([{"text": text}])
        print(f"{text}: {'good' if row['prediction'] else 'bad'}")


def mark(spark: SparkSession, args: argparse.Namespace) -> float:
    """Train a model of token classes, and count the words of new texts with the right class."""
    net = Marker(bert(BertForTokenClassification, num_labels=2))
    estimator = TorchEstimator(
        **common_params(args, net), collate_fn=collate_names, label_cols=["is_name"]
    )
    model = estimator.fit(frame(spark, args.texts, seed=1))
    right = words = 0
    for row in model.transform(frame(spark, 200, seed=2)).collect():
        classes = np.argmax(np.array(row["is_name__output"]), axis=0)[: len(row["is_name"])]
        right += int((classes == np.array(row["is_name"])).sum())
        words += len(row["is_name"])
    print(f"Words of the right class: {right / words:.3f}")
    return right / words


def write(spark: SparkSession, args: argparse.Namespace) -> float:
    """Train a model that reverses sentences, and let it write new ones."""
    config = T5Config(
        vocab_size=len(TOKENIZER),
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=TOKENIZER.pad_token_id,
        eos_token_id=TOKENIZER.eos_token_id,
        dropout_rate=0.0,
    )
    net = Writer(T5ForConditionalGeneration(config), length=13)
    estimator = TorchEstimator(
        **common_params(args, net), collate_fn=collate_pairs, label_cols=["reversed"]
    )
    model = estimator.fit(frame(spark, args.texts, seed=1))
    written = model.transform(frame(spark, 50, seed=2)).collect()
    right = 0
    for row in written:
        ids = [int(number) for number in row["reversed__output"]]
        text = TOKENIZER.decode(ids, skip_special_tokens=True)
        right += text == row["reversed"]
    print(f"{row['text']} -> {text}")
    print(f"Sentences that are reversed: {right / 50:.3f}")
    return right / 50


TASKS = {"classification": classify, "tokens": mark, "generation": write}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    parser = make_parser(__doc__, "hugging_face", epochs=4, batch_size=16, learning_rate=3e-3)
    parser.add_argument("--task", choices=TASKS, default="classification")
    parser.add_argument("--texts", type=int, default=2000, help="texts to train on")
    return parser.parse_args(argv)


def run(spark: SparkSession, args: argparse.Namespace) -> float:
    """Train the model of a task; return the share of new texts (words: tokens) that are right."""
    torch.manual_seed(args.seed)
    return TASKS[args.task](spark, args)


if __name__ == "__main__":
    arguments = parse_args()
    with start_spark(arguments, "hugging_face") as session:
        run(session, arguments)
