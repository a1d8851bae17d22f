"""Classify English docstrings by library with a small transformer, built from scratch.

The texts are docstrings of installed libraries. Spark splits each text into words, removes the
names of the libraries, and numbers the 3,000 most frequent words. The transformer (embeddings of
words and positions, blocks of attention and two layers) learns which library a text comes from. A
quarter of the files is the test set. The baseline is Spark's logistic regression on word counts.

Run it with ``python examples/text_transformer.py``; see ``--help`` for options.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import random
import zlib
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import torch
from common import make_parser, start_spark
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.classification import LogisticRegression
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import CountVectorizer, IndexToString, RegexTokenizer, StringIndexer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import nn

from hvd_estimators import Store
from hvd_estimators.torch import TorchEstimator

LIBRARIES = ("torch", "pandas", "sklearn", "matplotlib", "pyspark")
NAMES = r"(torch|pandas|\bpd\b|sklearn|scikit|matplotlib|\bmpl\b|\bplt\b|py\w*|spark\w*)"
LENGTH = 48
"""Maximum number of words that the network reads of a text."""

VOCABULARY = 3000


def docstrings(library: str, count: int, seed: int) -> Iterator[tuple[str, str, bool]]:
    """Yield a library's texts, its name, and whether they are test texts, file by file."""
    package = importlib.util.find_spec(library)
    if package is None or package.origin is None:
        raise SystemExit(f"{library} is not installed.")
    root = Path(package.origin).parent
    files = sorted(path for path in root.rglob("*.py") if "tests" not in path.parts)
    random.Random(seed).shuffle(files)
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = 0
    for path in files:
        try:
            tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        except SyntaxError:
            continue  # written for a newer Python
        texts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
        is_held_out = zlib.crc32(path.name.encode()) % 4 == 0
        for text in texts:
            if text and len(text) >= 100:
                yield text, library, is_held_out
                found += 1
            if found == count:
                return


def read_texts(spark: SparkSession, count: int, seed: int) -> DataFrame:
    """Return texts with their words in lower case, in the original order."""
    rows = [row for library in LIBRARIES for row in docstrings(library, count, seed)]
    frame = pd.DataFrame(rows, columns=["text", "library", "is_held_out"])
    texts = spark.createDataFrame(frame).repartition(4)
    nameless = F.regexp_replace(F.lower("text"), NAMES, "")
    cleaned = texts.withColumn("nameless", nameless)
    # All characters except letters separate words.
    return RegexTokenizer(inputCol="nameless", outputCol="words", pattern="[^a-z]+").transform(
        cleaned
    )


def with_tokens(texts: DataFrame, vocabulary: list[str]) -> DataFrame:
    """Add ``tokens``: the numbers of the first words; 0 is padding, 1 is any other word."""
    numbers = {word: number for number, word in enumerate(vocabulary, start=2)}

    @F.pandas_udf("array<int>")
    def to_numbers(words: pd.Series) -> pd.Series:
        def row(text: list[str]) -> list[int]:
            known = [numbers.get(word, 1) for word in text[:LENGTH]]
            return known + [0] * (LENGTH - len(known))

        return words.map(row)

    return texts.withColumn("tokens", to_numbers("words"))


class Block(nn.Module):
    """Attention over the words of a text, then two layers for each word; both add to the input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.layers = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor, is_word: torch.Tensor) -> torch.Tensor:
        """Transform words, shape (rows, length, width), given a mask of real words."""
        rows, length, width = x.shape
        parts = self.queries_keys_values(self.norms[0](x)).chunk(3, dim=-1)
        queries, keys, values = (
            part.view(rows, length, self.heads, -1).transpose(1, 2) for part in parts
        )
        seen = nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=is_word[:, None, None, :]
        )
        x = x + self.merge(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.layers(self.norms[1](x))


class TextNet(nn.Module):
    """Embed words and positions, apply the blocks, and score the classes by the mean word."""

    def __init__(self, classes: int, width: int = 64, heads: int = 4, blocks: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY + 2, width, padding_idx=0)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Dropout(0.2), nn.Linear(width, classes))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens.long()
        is_word = tokens > 0
        x = self.words(tokens) + self.positions
        for block in self.blocks:
            x = block(x, is_word)
        weights = is_word[:, :, None].float()
        mean = (x * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)
        return self.head(mean)


def train_transformer(
    train: DataFrame, words: list[str], args: argparse.Namespace
) -> PipelineModel:
    """Return the fitted pipeline of network and predicted words."""
    torch.manual_seed(args.seed)
    network = TextNet(len(words))
    estimator = TorchEstimator(
        num_proc=args.num_proc,
        store=Store.create(str(args.output / "store")),
        model=network,
        optimizer=torch.optim.AdamW(network.parameters(), lr=args.learning_rate),
        loss=nn.functional.cross_entropy,
        feature_cols=["tokens"],
        label_cols=["library_index"],
        column_dtypes={"tokens": "int32", "library_index": "int64"},
        outputs_are="logits",
        predictionCol="prediction",
        validation=0.1,
        batch_size=args.batch_size,
        epochs=args.epochs,
        random_seed=args.seed,
        verbose=1,
    )
    to_words = IndexToString(inputCol="prediction", outputCol="predicted", labels=words)
    return Pipeline(stages=[estimator, to_words]).fit(train)


def run(spark: SparkSession, args: argparse.Namespace) -> dict[str, float]:
    """Train both models, and return their accuracies on the test files."""
    texts = read_texts(spark, args.texts, args.seed)
    indexer = StringIndexer(inputCol="library", outputCol="library_index").fit(texts)
    train = texts.where("not is_held_out")
    counter = CountVectorizer(inputCol="words", outputCol="features", vocabSize=VOCABULARY).fit(
        train
    )
    ready = with_tokens(counter.transform(indexer.transform(texts)), counter.vocabulary).cache()
    train, held_out = ready.where("not is_held_out"), ready.where("is_held_out")
    print(f"{train.count():,} texts to train on, {held_out.count():,} held out")

    network = train_transformer(train, indexer.labels, args)
    linear = LogisticRegression(labelCol="library_index", regParam=0.01, maxIter=30).fit(train)

    predictions = network.transform(held_out).cache()
    evaluator = MulticlassClassificationEvaluator(labelCol="library_index", metricName="accuracy")
    scores = {
        "transformer": evaluator.evaluate(predictions),
        "logistic regression": evaluator.evaluate(linear.transform(held_out)),
    }
    print("\nAccuracy on files held out")
    for name, score in scores.items():
        print(f"{name:<22}{score:.3f}")
    print("Who is taken for whom (rows: the truth):")
    predictions.groupBy("library").pivot("predicted").count().fillna(0).orderBy("library").show()
    return scores


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    parser = make_parser(__doc__, "text_transformer", epochs=6)
    parser.add_argument("--texts", type=int, default=1000, help="of each library, at most")
    return parser.parse_args(argv)


if __name__ == "__main__":
    arguments = parse_args()
    with start_spark(arguments, "text_transformer") as session:
        run(session, arguments)
