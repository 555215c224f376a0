"""Tokenizer files made to be odd: text is encoded and decoded as the `tokenizers` package does it, or the
file is refused with the key that is at fault."""

import json
import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from peers.data.tokenizer import FileTokenizer, TextError, open_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. 12.5 % of all foxes do.\n",
    "def naïve(self, x):\n\treturn self.x == '日本語' and x[1:] != \"ÀÉÎ\"\r\n",
    "don't won't I'll   three spaces, e\u0301 as two, ﬁ as one, ＡＢ wide, ½\n",
] * 3
PAD, UNKNOWN, END, START = "[PAD]", "[UNK]", "</s>", "<s>"
TEXTS = [
    "",
    " ",
    "The fox",
    "  leading and trailing  ",
    "\ufeffa mark of the byte order at the start, and \ufeff inside",
    "a line\r\nand\ta tab\n\n\nand lines\x0b\x0c\x85\u2028end",
    "naïve e\u0301 ﬁ ＡＢ ½ 日本語 🐝👩‍👩‍👧 \u200b\u00ad\u202e",
    "control [PAD] [UNK] </s> <s> <|user|> <0x41> ▁ Ġ ## word##",
    "a replaced \ufffd character, a nul \x00 and \x1b[2J",
    "x" * 300 + " " * 40 + "1234567890" * 8,
]
NORMALIZERS: list[Any] = [
    None,
    normalizers.NFC(),
    normalizers.NFKC(),
    normalizers.Lowercase(),
    normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
    normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    normalizers.Strip(left=True, right=False),
    normalizers.Nmt(),
    normalizers.BertNormalizer(),
    normalizers.ByteLevel(),
]
PRE_TOKENIZERS: list[Any] = [
    None,
    pre_tokenizers.ByteLevel(add_prefix_space=False),
    pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False),
    pre_tokenizers.Metaspace(prepend_scheme="always"),
    pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
    pre_tokenizers.Metaspace(prepend_scheme="never"),
    pre_tokenizers.Whitespace(),
    pre_tokenizers.WhitespaceSplit(),
    pre_tokenizers.BertPreTokenizer(),
    pre_tokenizers.Punctuation("contiguous"),
    pre_tokenizers.UnicodeScripts(),
    pre_tokenizers.CharDelimiterSplit("x"),
    pre_tokenizers.FixedLength(length=5),
    pre_tokenizers.Split("\n", "merged_with_next", invert=False),
    pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]),
]
DECODERS: list[Any] = [
    None,
    decoders.ByteLevel(),
    decoders.BPEDecoder(),
    decoders.WordPiece(cleanup=True),
    decoders.Metaspace(),
    decoders.CTC(),
    decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
]
POST_PROCESSORS: list[Any] = [
    None,
    processors.ByteLevel(trim_offsets=True),
    processors.TemplateProcessing(single=f"{START} $A {END}", special_tokens=[(START, 3), (END, 2)]),
    processors.BertProcessing((END, 2), (START, 3)),
    processors.RobertaProcessing((END, 2), (START, 3)),
]
TRUNCATION = {"direction": "Left", "max_length": 3, "strategy": "OnlyFirst", "stride": 1}
PADDING = {
    "strategy": {"Fixed": 64},
    "direction": "Left",
    "pad_to_multiple_of": 8,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": PAD,
}
CASES = 60


def trained(chance: random.Random, kind: str, normalizer: Any, pre_tokenizer: Any) -> Tokenizer:
    """A tokenizer of this kind for CORPUS, whose first ids are control tokens."""
    first = [PAD, UNKNOWN, END, START]
    if kind == "bpe":
        fallback, affixes = chance.random() < 0.5, {}
        if chance.random() < 0.3:
            affixes["continuing_subword_prefix"] = "##"
        if chance.random() < 0.3:
            affixes["end_of_word_suffix"] = "</w>"
        unknown = {"unk_token": UNKNOWN} if chance.random() < 0.5 else {}
        model = models.BPE(fuse_unk=chance.random() < 0.5, byte_fallback=fallback, **unknown, **affixes)
        more = [f"<0x{byte:02X}>" for byte in range(256)] if fallback else []
        trainer: Any = trainers.BpeTrainer(
            vocab_size=600, special_tokens=[*first, *more], show_progress=False, **affixes
        )
    elif kind == "wordpiece":
        model = models.WordPiece(unk_token=UNKNOWN, max_input_chars_per_word=chance.choice([5, 100]))
        trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=first, show_progress=False)
    elif kind == "unigram":
        model = models.Unigram()
        trainer = trainers.UnigramTrainer(
            vocab_size=200, special_tokens=first, unk_token=UNKNOWN, show_progress=False
        )
    else:
        model = models.WordLevel(unk_token=UNKNOWN)
        trainer = trainers.WordLevelTrainer(vocab_size=200, special_tokens=first, show_progress=False)
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def odd(number: int) -> tuple[dict[str, Any], bytes]:
    """The content of the file of a case, and its bytes. Each kind of each part comes in some case."""
    chance = random.Random(number)
    kind = ("bpe", "wordpiece", "unigram", "wordlevel")[number % 4]
    tokenizer = trained(
        chance, kind, NORMALIZERS[number % len(NORMALIZERS)], PRE_TOKENIZERS[number % len(PRE_TOKENIZERS)]
    )
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    for key, kinds in (("decoder", DECODERS), ("post_processor", POST_PROCESSORS)):
        part = kinds[number % len(kinds)]
        content[key] = None if part is None else json.loads(part.__getstate__())
    largest = max(entry["id"] for entry in content["added_tokens"])
    vocabulary = content["model"]["vocab"]
    if (
        kind != "unigram" and chance.random() < 0.4
    ):  # Gaps: ids of the model, though not of its control tokens.
        vocabulary.update({token: 2 * id for token, id in vocabulary.items() if id > largest})
    count = max(vocabulary.values()) + 1 if kind != "unigram" else len(vocabulary)
    for place, token in enumerate(("<|user|>", " spaced ", "fox", "日本")):
        if token in vocabulary:
            continue
        flags = {
            flag: chance.random() < 0.5
            for flag in ("single_word", "lstrip", "rstrip", "normalized", "special")
        }
        content["added_tokens"].append({"id": count + place, "content": token, **flags})
    content["truncation"] = chance.choice([None, TRUNCATION])
    content["padding"] = chance.choice([None, PADDING])
    if kind == "bpe":
        content["model"]["dropout"] = chance.choice([None, 0.0, 0.5, 1.0])
    left_out = [
        key for key in ("truncation", "padding", "post_processor", "version") if chance.random() < 0.2
    ]
    content = {key: value for key, value in content.items() if key not in left_out}
    mark = b"\xef\xbb\xbf" if chance.random() < 0.3 else b""
    return content, mark + json.dumps(content, ensure_ascii=chance.random() < 0.5).encode()


def reference(content: dict[str, Any]) -> Tokenizer:
    """The tokenizer of the package, with what changes a text switched off."""
    plain = content | {"truncation": None, "padding": None, "model": content["model"] | {}}
    plain["model"].pop("dropout", None)
    tokenizer = Tokenizer.from_str(json.dumps(plain))
    tokenizer.encode_special_tokens = True
    return tokenizer


@pytest.mark.parametrize("number", range(CASES))
def test_an_odd_file_is_used_as_the_package_uses_it(number, tmp_path):
    content, data = odd(number)
    file = tmp_path / "tokenizer.json"
    file.write_bytes(data)
    ours = open_tokenizer(file, 4096)
    theirs = reference(content)
    for text in TEXTS:
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text.encode()).tolist() == expected, repr(text)
        decoded = theirs.decode(expected, skip_special_tokens=False).rstrip("\ufffd")
        assert ours.decode(expected).decode() == decoded, repr(text)
    switched_off = [
        name
        for name, value in (
            ("truncation", content.get("truncation")),
            ("padding", content.get("padding")),
            ("model.dropout", content["model"].get("dropout")),
        )
        if value
    ]
    assert all(name in ours.warning for name in switched_off)
    assert bool(ours.warning) == bool(switched_off)
    assert ours.vocabulary == max(theirs.get_vocab().values()) + 1


def refusals():
    """What is changed in a file, the key that is named, and what else is said."""
    part = {"type": "Magic"}
    bracket = {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
    added = {"id": 3, "special": True}
    return {
        **{
            key: ({key: part}, key, "is not a tokenizer.json")
            for key in ("normalizer", "pre_tokenizer", "post_processor", "decoder", "model")
        },
        "a pattern": ({"pre_tokenizer": bracket}, "pre_tokenizer", "unmatched parenthesis"),
        "an added token": ({"added_tokens": [added]}, "added_tokens", "missing field `content`"),
        "a version": ({"version": "2.0"}, "version", "Unknown tokenizer version"),
        "a key": ({"extra": 1}, "extra", "is not a tokenizer.json"),
        "no unknown token": (
            {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}},
            "model",
            "UNK",
        ),
        "an id of 32 bits": ({"model": bpe({"a": 2**31})}, "model", "the largest id is 2147483648, at most"),
        "an id of 33 bits": ({"model": bpe({"a": 2**32})}, "model", "expected u32"),
        "an id below 0": ({"model": bpe({"a": -1})}, "model", "expected u32"),
        "no tokens": ({"model": bpe({})}, "model", "there are no tokens"),
    }


def bpe(vocabulary: dict[str, int]) -> dict[str, Any]:
    return {"type": "BPE", "vocab": vocabulary, "merges": []}


@pytest.mark.parametrize("name", refusals())
def test_a_file_that_cannot_be_used_is_refused_by_its_key(name, tmp_path):
    changes, key, said = refusals()[name]
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": bpe({"a": 0})} | changes))
    with pytest.raises(TextError, match=f"{said}.*the fault is in its key `{key}`"):
        FileTokenizer(file)


def test_what_is_no_tokenizer_json_is_refused_with_what_to_do(tmp_path):
    file = tmp_path / "tokenizer.model"
    file.write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    with pytest.raises(TextError, match=r"is not a tokenizer.json.*save_pretrained"):
        FileTokenizer(file)
    with pytest.raises(TextError, match=r"is a folder: name the tokenizer.json in it"):
        FileTokenizer(tmp_path)
