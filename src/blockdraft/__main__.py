"""The program `blockdraft`, and `python -m blockdraft` where scripts are not on the path."""

from blockdraft.cli.imports import ended_by_interrupt


def main() -> None:
    """Run the command line, whose modules are half a second of imports."""
    with ended_by_interrupt():
        from blockdraft.cli.main import main as run
    run()


if __name__ == "__main__":
    main()
