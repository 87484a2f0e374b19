"""Fuzzing of everything that decodes bytes from outside.

    make fuzz                                   # all targets, a minute
    make fuzz ARGS="--count 10000000"           # ten million inputs
    make fuzz ARGS="--target peer --count 1000000 --seed 7"

Inputs are made of real messages: fields replaced, cut, nested, with surplus ones, frames merged and cut apart. Where
atheris is installed, half of them are guided by which lines of kvpool they reach. A target may raise kvpool's own
errors and nothing else; that is the whole oracle, next to a process that lives and does not grow.
"""
