"""The command that writes text: a tokenizer made here, a chat template, times, one line for errors."""

import functools
import json
import pathlib
import sys

import pytest
from flax import nnx

import lajax
import lajax.layers as L
from lajax.models import RecallModel

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "experiments"))

import generate as experiment
import text as experiment_text

SPECIAL = ("<s>", "</s>", "<user>", "<model>")
TEMPLATE = "{{ bos_token }}{% for m in messages %}<user>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<model>{% endif %}"


@functools.cache
def tokenizer():
  """A tokenizer of bytes, with the special tokens 0 to 3."""
  from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  vocabulary = {x: n for n, x in enumerate((*SPECIAL, *alphabet))}
  made = Tokenizer(models.BPE(vocabulary, []))
  made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = decoders.ByteLevel()
  made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
  made.add_special_tokens(list(SPECIAL))
  return made


@functools.cache
def model():
  layers = [functools.partial(L.GatedDeltaNet, 8, 2, 4, impl="recurrent")]
  return RecallModel(tokenizer().get_vocab_size(), 8, layers, rngs=nnx.Rngs(0))


@pytest.fixture
def folder(tmp_path, monkeypatch):
  tokenizer().save(str(tmp_path / "tokenizer.json"))
  config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
  (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
  monkeypatch.setattr(lajax.models, "load", lambda path: model(), raising=False)
  return tmp_path


def with_template(folder: pathlib.Path, where: str) -> None:
  if where == "file":
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return
  path = folder / "tokenizer_config.json"
  named = [{"name": "tools", "template": "x"}, {"name": "default", "template": TEMPLATE}]
  config = json.loads(path.read_text())
  path.write_text(json.dumps(config | {"chat_template": TEMPLATE if where == "entry" else named}))


@pytest.mark.usefixtures("quick_compiles")
def test_command(folder, capsys):
  """Its text is that of the same tokens in one call; four lines say how fast."""
  flags = ["--model", str(folder), "--prompt", "It was", "--max-tokens", "9", "--temperature", "2"]
  experiment.main(flags)
  printed = capsys.readouterr().out
  text, _, report = printed.rpartition("\n\n")
  prompt = tokenizer().encode("It was").ids
  options = dict(temperature=2.0, stop_tokens=[1, 2], key=experiment.jax.random.key(0))
  tokens = lajax.generate(model(), [prompt], 9, **options)[0]
  whole = tokenizer().decode([x for x in tokens.tolist() if x >= 0])
  assert text.replace("�", "") == whole[: len(text)].replace("�", "")
  lines = report.splitlines()
  assert lines[0].startswith("prefill: 7 tokens, ")
  assert lines[1].startswith("decode: ")
  assert lines[1].endswith(" tokens/s, each printed as it came")
  assert lines[2].startswith("state: ")
  assert lines[3].split(";")[0] in ("ended by a stop token", "ended by --max-tokens")


@pytest.mark.parametrize("where", ["file", "entry", "list"])
def test_chat_template(folder, where):
  with_template(folder, where)
  text = experiment_text.Text(folder)
  assert text.as_chat("Hi") == "<s><user>Hi<model>"
  hi = [tokenizer().token_to_id(x) for x in "Hi"]
  assert text.encode("Hi") == [0, 2, *hi, 3]
  assert text.encode("Hi", chat=False) == [0, *hi]
  assert text.stop_tokens == [1, 2]


def test_characters_of_several_tokens_come_whole(folder):
  text = experiment_text.Text(folder)
  ids = text.encode("a€b")
  assert len(ids) == 6
  assert list(text.decode(ids)) == ["", "a", "", "", "€", "b"]


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    ("--prompt x", "--model is missing"),
    ("--model nowhere --prompt x", "--model nowhere: no such folder"),
    ("--model FOLDER", "--prompt is missing"),
    ("--model FOLDER --prompt x --max-tokens 0", "--max-tokens must be at least 1; got 0"),
    ("--model FOLDER --prompt x --top-p 2", "`top_p` must be a number"),
    ("--model EMPTY --prompt x", "has no tokenizer.json"),
    ("--model BROKEN --prompt x", "tokenizer.json: "),
    ("--model REFUSES --prompt x", "the chat template: no users"),
  ],
)
def test_errors_are_one_line(folder, flags, message, capsys):
  (folder / "empty").mkdir()
  (folder / "broken").mkdir()
  (folder / "broken" / "tokenizer.json").write_text("{")
  refuses = folder / "refuses"
  refuses.mkdir()
  tokenizer().save(str(refuses / "tokenizer.json"))
  (refuses / "chat_template.jinja").write_text("{{ raise_exception('no users') }}")
  names = {"FOLDER": folder} | {x.upper(): folder / x for x in ("empty", "broken", "refuses")}
  with pytest.raises(SystemExit) as end:
    experiment.main([str(names.get(x, x)) for x in flags.split()])
  assert end.value.code == 2
  error = capsys.readouterr().err
  assert error.startswith("generate.py: error: ")
  assert message in error
  assert error.count("\n") == 1


@pytest.mark.parametrize("name", ["tokenizers", "jinja2"])
def test_missing_libraries(folder, name, monkeypatch, capsys):
  """The message says which extra brings them."""
  with_template(folder, "file")
  for module in [x for x in sys.modules if x.split(".")[0] == name]:
    monkeypatch.delitem(sys.modules, module)
  monkeypatch.setitem(sys.modules, name, None)
  with pytest.raises(SystemExit):
    experiment.main(["--model", str(folder), "--prompt", "x"])
  assert f"{name} is not installed: pip install 'lajax[text]'" in capsys.readouterr().err
