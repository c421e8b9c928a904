"""An environment: the game "higher or lower" for chat models. (toy/guess has it without words.)

    python agent.py --env rewards/higher_or_lower.py:Game --dataset games.jsonl --model Qwen/Qwen3-0.6B --bf16 \\
        --response-length 96

A row of games.jsonl has a conversation that ends with a question, and the number to find. A small model needs an
example of a complete game in the conversation (experiments/real_data.py writes such rows):

    {"prompt": [{"role": "user", "content": "I think of a number from 1 to 15. What is it?"}], "number": 6}
"""

import re

TURNS = 8  # maximum number of guesses in a game


class Game:
    """One game. Finding the number with the n-th guess earns 1 − (n − 1) / 8; all else earns 0. A guess is the last
    number in a turn.

    >>> game = Game({"number": 6})
    >>> game.step("Is it 8?"), game.step("Eight."), game.step("So 4 is too low; 6!")
    (('Lower.', None, False), ('Say a number.', None, False), ('', 0.75, True))
    """

    def __init__(self, example: dict):
        """Starts a game with the `number` of a row of the data."""
        self.number = example["number"]
        self.guesses = 0

    def step(self, text: str) -> tuple[str, float | None, bool]:
        """Returns the answer to a turn of the policy, the turn's reward, and whether the game is over."""
        self.guesses += 1
        is_last = self.guesses == TURNS
        numbers = re.findall(r"\d+", text)
        if not numbers:
            return "Say a number.", None, is_last
        guess = float(numbers[-1])
        if guess == self.number:
            return "", 1 - (self.guesses - 1) / TURNS, True
        return ("Higher." if guess < self.number else "Lower."), None, is_last
