"""Text and tokens by the files of a Hugging Face folder: tokenizer, chat template, stop tokens."""

import datetime
import json
import pathlib
from collections.abc import Iterable
from typing import Any

MISSING = "{name} is not installed: pip install 'lajax[text]'"


class Text:
  """Tokenizer of a folder's `tokenizer.json`, with the folder's chat template if there is one.

  Raises:
    ValueError: the folder has no `tokenizer.json`, or a file is not what its name says.
    ImportError: the library that reads a file is not installed; the message says how to get it.
  """

  def __init__(self, folder: pathlib.Path):
    try:
      import tokenizers
      from tokenizers.decoders import DecodeStream
    except ImportError:
      raise ImportError(MISSING.format(name="tokenizers")) from None
    path = folder / "tokenizer.json"
    if not path.is_file():
      raise ValueError(f"{folder} has no tokenizer.json")
    try:
      self.tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises no other class
      raise ValueError(f"{path}: {error}") from None
    self._decode_stream = DecodeStream
    self.config = _json(folder / "tokenizer_config.json")
    self.template = _template(folder, self.config)
    self.stop_tokens = self._stop_tokens(folder)

  def encode(self, text: str, *, chat: bool = True) -> list[int]:
    """Returns the tokens of a text, written into the chat template if the folder has one."""
    if not chat or self.template is None:
      return self.tokenizer.encode(text).ids
    # The template writes the special tokens itself.
    return self.tokenizer.encode(self.as_chat(text), add_special_tokens=False).ids

  def as_chat(self, text: str) -> str:
    """Returns the chat in which a user says this text, up to where the model answers."""
    try:
      import jinja2.sandbox
    except ImportError:
      raise ImportError(MISSING.format(name="jinja2")) from None
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda x, indent=None: json.dumps(
      x, ensure_ascii=False, indent=indent
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    special = {name: _content(x) for name, x in self.config.items() if name.endswith("_token")}
    messages = [{"role": "user", "content": text}]
    try:
      template = environment.from_string(self.template or "")
      return template.render(messages=messages, add_generation_prompt=True, **special)
    except jinja2.TemplateError as error:
      raise ValueError(f"the chat template: {error}") from None

  def decode(self, tokens: Iterable[int]) -> Iterable[str]:
    """Yields text as its tokens come; a character of several tokens comes with the last one."""
    stream = self._decode_stream(skip_special_tokens=True)
    for token in tokens:
      yield stream.step(self.tokenizer, token) or ""

  def _stop_tokens(self, folder: pathlib.Path) -> list[int]:
    """Tokens that end a text: of the generation's, the tokenizer's and the model's settings."""
    found: list[Any] = []
    for name in ("generation_config.json", "config.json"):
      ids = _json(folder / name).get("eos_token_id")
      found += ids if isinstance(ids, list) else [ids]
    found.append(self.tokenizer.token_to_id(_content(self.config.get("eos_token")) or ""))
    return sorted({token for token in found if isinstance(token, int)})


def _json(path: pathlib.Path) -> dict[str, Any]:
  """Contents of a file of JSON, nothing where it is missing."""
  if not path.is_file():
    return {}
  try:
    found = json.loads(path.read_text(encoding="utf-8"))
  except json.JSONDecodeError as error:
    raise ValueError(f"{path}: {error}") from None
  if not isinstance(found, dict):
    raise ValueError(f"{path} must hold a JSON object")
  return found


def _template(folder: pathlib.Path, config: dict[str, Any]) -> str | None:
  """Chat template of a folder: a file of its own, or an entry of the tokenizer's settings."""
  path = folder / "chat_template.jinja"
  if path.is_file():
    return path.read_text(encoding="utf-8")
  found = config.get("chat_template")
  if isinstance(found, list):  # several, by name
    found = {entry.get("name"): entry.get("template") for entry in found}.get("default")
  return found


def _content(token: Any) -> str | None:
  """Text of a special token, which is written as a string or as an object."""
  return token.get("content") if isinstance(token, dict) else token


def _refuse(message: str):
  raise ValueError(f"the chat template: {message}")
