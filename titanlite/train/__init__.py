"""One run on one rank: `build` makes its parts, `loop` trains, `evaluate` scores what is held out."""
