"""The referee: every op and many random compositions, against a truth that shares no code with the library.

    full mode       `J Σ Jᵀ`, `J` by automatic differentiation of the model itself, at variances of about 1e-10
    diagonal mode   a literal evaluation of the independence that it states (`literal.py`)

Only the public interface is used: `pg.streamline`, the posteriors, `net.plan`, the errors. `truth.py` says what the
library leaves out by design, and makes the truth leave it out too. `make referee` is the long run; `python -m referee
--help` says how to judge a single case.
"""
