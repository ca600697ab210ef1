"""`python -m pagedattn_serving` is `pagedattn-serve`."""

from pagedattn_serving.server.command import main

if __name__ == "__main__":
    main()
