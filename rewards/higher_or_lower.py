"""An environment: higher or lower, played in words by a chat model, as toy/guess plays it in numbers alone.

    python grpo.py --env rewards/higher_or_lower.py:Game --dataset games.jsonl --model Qwen/Qwen3-0.6B --bf16 \\
        --response-length 96

A row of games.jsonl is a conversation that ends with a question, and the number that is to be found. A small model does
not know what is wanted unless the conversation shows it a game that is over (experiments/real.py writes such rows):

    {"prompt": [{"role": "user", "content": "I think of a number from 1 to 15. What is it?"}], "number": 6}
"""

import re

TURNS = 8  # guesses in a game at most


class Game:
    """One game. The number found with the n-th guess earns 1 − (n − 1) / 8, and nothing else earns anything. A guess is
    the last number that was said.

    >>> game = Game({"number": 6})
    >>> game.step("Is it 8?"), game.step("Eight."), game.step("So 4 is too low; 6!")
    (('Lower.', None, False), ('Say a number.', None, False), ('', 0.75, True))
    """

    def __init__(self, example: dict):
        """A game about the `number` of a row of the data."""
        self.number = example["number"]
        self.guesses = 0

    def step(self, said: str) -> tuple[str, float | None, bool]:
        """The answer to what the policy said in its turn, the turn's reward, and whether the game is over."""
        self.guesses += 1
        is_last = self.guesses == TURNS
        numbers = re.findall(r"\d+", said)
        if not numbers:
            return "Say a number.", None, is_last
        guess = float(numbers[-1])
        if guess == self.number:
            return "", 1 - (self.guesses - 1) / TURNS, True
        return ("Higher." if guess < self.number else "Lower."), None, is_last
