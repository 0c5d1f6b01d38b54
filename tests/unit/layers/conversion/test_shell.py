from builder.layers.shell import UNKNOWN, Command, read_script


def read(text: str) -> list[Command]:
    return read_script(text.encode())


def test_words_are_unquoted_and_variables_filled_in() -> None:
    (command,) = read("""SITE="/opt/x"\nsed -i 's/a b/c/' "$SITE/vllm/y.py" ${OTHER:-z}/q\n""")
    assert command.words == ("sed", "-i", "s/a b/c/", "/opt/x/vllm/y.py", "z/q")
    assert command.line == 2


def test_values_that_only_a_run_gives_are_unknown() -> None:
    (_, command) = read('D="$(pwd)"\ncd "$D"\npatch -p1 -i "$D/x.patch"\n')
    assert command.words[-1] == f"{UNKNOWN}/x.patch"


def test_pipes_are_kept() -> None:
    curl, other = read("curl -L URL | git apply\n")
    assert other.source == curl
    assert other.words == ("git", "apply")


def test_a_here_document_is_no_command() -> None:
    (command,) = read("python3 - <<'EOF'\nsed -i s/a/b/ f\nEOF\n")
    assert command.name == "python3"
    assert command.heredocs[0].text == "sed -i s/a/b/ f\n"


def test_commands_in_conditions_and_loops_are_read() -> None:
    commands = read('if grep -q x f; then for f in $(find .); do sed -i s/a/b/ "$f"; done; fi\n')
    assert commands[-1].words[-1] == UNKNOWN


def test_exports_are_values() -> None:
    (command,) = read('export VLLM_A=1 VLLM_B="$(date)"\n')
    assert command.exports == (("VLLM_A", "1"), ("VLLM_B", UNKNOWN))


def test_a_script_that_is_cut_off_is_read_as_far_as_it_goes() -> None:
    assert read("sed -i s/a/b/ f\nif true; then\n")[0].name == "sed"
