"""The corpus of a finished run, whose validation rows are scored, if its files are the same."""

from fp8jax.lm.corpus import Corpus, build_corpus
from fp8jax.lm.data.token_rows import OWN
from fp8jax.lm.interop.trained import TrainedModel
from fp8jax.lm.sources import chat_readers, parse_sources


def corpus_of_run(trained: TrainedModel, length: int | None = None) -> Corpus:
    """Returns the corpus that a run trained on.

    Args:
      trained: by a run, with its tokenizer.
      length: tokens of a row; None for the run's. Conversations keep the run's, since the longest
        ones were cut or left out by it.

    Raises:
      ValueError: no run trained it, its rows came from no files, or the files have changed.
    """
    record = trained.record
    if record is None or trained.tokenizer is None:
        raise ValueError(f"{trained.name} is of no run with held-out documents")
    if record["data"] == OWN:
        raise ValueError(f"{trained.name} trained on rows that no config names")
    # Runs that are older than these keys left out no conversations.
    fit = {key: record[key] for key in ("long_examples", "bad_examples") if key in record}
    chats = chat_readers(parse_sources(record["data"]))
    corpus = build_corpus(
        record["data"],
        trained.tokenizer,
        seq_len=record["seq_len"] if chats or length is None else length,
        valid_fraction=record["valid"]["fraction"],
        cache_dir=record["cache_dir"],
        **fit,
    )
    if corpus.fingerprint != trained.data:
        raise ValueError(
            f"{trained.name}: the files of data={record['data']} are not those that it trained on,"
            " so that it may have trained on what would be held out now: restore them"
        )
    return corpus
