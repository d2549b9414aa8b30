"""Page gather and scatter; a torch reference beside every Triton kernel."""

if __name__ != "asynchicache.kernels":
    # Where the repository's root is on the path, transformers takes this folder for Hugging Face's package of
    # the same name, imports it and asks for its version: it may, and finds that there is none.
    __path__ = []  # but nothing in here gets a second name

    def __getattr__(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError("import this folder as asynchicache.kernels, not as kernels")
