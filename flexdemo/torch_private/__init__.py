"""All that flexdemo uses of torch and torch keeps private, one module per subject.

Nothing else in this package touches a private name of torch, but for ``torch._foreach_*``: torch's own optimizers are
written with these functions, and so are those of other libraries.
"""
