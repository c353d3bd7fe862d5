"""The environment of the demo with a tool: a letter stands for another letter, which only the tool knows.

The prompt is that of the demo, and the first letter is the key. The model asks with `? KEY`, reads the letter, and
answers with it. It earns 0.2 for a question, 0.3 more for the right one, and 0.5 more for the right answer after it.
"""

from typing import Any

from rolepool.seeds import derive_seed

LETTERS = "abcdefgh"
"""The words of the demo's prompts."""


def parse_question(text: str) -> list[tuple[str, dict[str, str]]]:
    """The call that a turn contains, in the words that the demo's tokenizer has: `? KEY`."""
    _, _, rest = text.partition("?")
    words = rest.split()
    if not words:
        return []
    return [("lookup", {"key": words[0]})]


class Lookup:
    """One conversation."""

    def reset(self, prompt: list[dict[str, str]], extra_info: dict[str, Any], **_: Any) -> None:
        last_message = prompt[-1]["content"]
        self._key = last_message.split()[0]
        seed = derive_seed(extra_info["split"], extra_info["index"])
        self._letter = LETTERS[seed % len(LETTERS)]
        self._was_asked = False
        self._was_right = False

    def lookup(self, key: str) -> str:
        """The letter that a key stands for.

        Args:
            key: The first letter of the prompt.
        """
        self._was_asked = True
        self._was_right = key == self._key
        return self._letter if self._was_right else "?"

    def get_reward(self, answer: str) -> float:
        """The score of the conversation, whose last turn is the answer."""
        is_correct = self._was_right and answer.split()[:1] == [self._letter]
        return 0.2 * self._was_asked + 0.3 * self._was_right + 0.5 * is_correct
