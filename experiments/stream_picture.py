"""Draw a row of `generate` as an SVG: the text, each forward pass's tokens in one shade.

    python experiments/stream_picture.py ROWS.jsonl BASE OUTPUT.svg [INDEX]

ROWS.jsonl is what `generate --output` wrote, BASE a folder with tokenizer files, INDEX the row [0].
README.md shows line 15 of the shipped prompts: 120 tokens at temperature 0.5, seed 0, with the head
of launch/quickstart.
"""

import json
import sys
from html import escape
from itertools import accumulate, pairwise
from pathlib import Path

from clover_jax.checkpoints.sources import find_directory
from clover_jax.data.tokenizer import load_tokenizer

COLUMNS, LINES = 88, 14
WIDTH, HEIGHT, MARGIN = 8.4, 20, 16  # pixels of a character, of a line, around the text
SHADES = ("#1f6feb", "#8250df")


def pieces(row, tokenizer):
    """Return the text that each forward gave; the first piece is the prompt's own forward."""
    ends = list(accumulate([1, *(count + 1 for count in row["accepted"])]))
    texts = ["", *(tokenizer.decode(row["output_ids"][:end]) for end in ends)]
    return [longer[len(shorter) :] for shorter, longer in pairwise(texts) if longer]


def cells(parts):
    """Yield (line, column, character, part): the text wrapped at COLUMNS, cut at LINES."""
    line = column = 0
    for number, part in enumerate(parts):
        for character in part:
            if character == "\n" or column == COLUMNS:
                line, column = line + 1, 0
            if line == LINES:
                return
            if character != "\n":
                yield line, column, character, number
                column += 1


def draw(parts, caption):
    """Return the SVG: a shaded box behind the characters of one forward, side by side."""
    placed = list(cells(parts))
    height = HEIGHT * (max(line for line, *_ in placed) + 2) + 2 * MARGIN
    width = WIDTH * COLUMNS + 2 * MARGIN
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14">',
        f'<rect width="{width:.0f}" height="{height}" rx="8" fill="#0d1117"/>',
    ]
    for line, column, character, number in placed:
        x, y = MARGIN + WIDTH * column, MARGIN + HEIGHT * line
        out.append(
            f'<rect x="{x:.1f}" y="{y}" width="{WIDTH}" height="{HEIGHT - 3}" '
            f'fill="{SHADES[number % 2]}" fill-opacity="0.55"/>'
        )
        if character != " ":
            out.append(f'<text x="{x:.1f}" y="{y + 13}" fill="#f0f6fc">{escape(character)}</text>')
    y = height - MARGIN
    out.append(f'<text x="{MARGIN}" y="{y}" fill="#8b949e">{escape(caption)}</text>')
    return "\n".join([*out, "</svg>\n"])


def main(rows, base, output, index="0"):
    """Write the picture of one row."""
    row = json.loads(Path(rows).read_text().splitlines()[int(index)])
    tokenizer = load_tokenizer(find_directory(base))
    forwards, tokens = row["target_forwards"], len(row["output_ids"])
    caption = f"{tokens} tokens in {forwards} forward passes: tau {row['tau']:.2f}"
    Path(output).write_text(draw(pieces(row, tokenizer), caption))


if __name__ == "__main__":
    main(*sys.argv[1:])
