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
    assert command.folder == UNKNOWN


def test_input_redirections_and_pipes_are_kept() -> None:
    one, curl, other = read("patch -p1 -d / < a.patch\ncurl -L URL | git apply\n")
    assert one.stdin == "a.patch"
    assert other.source == curl
    assert other.words == ("git", "apply")


def test_a_here_document_is_unknown_input() -> None:
    (command,) = read("python3 - <<'EOF'\nsed -i s/a/b/ f\nEOF\n")
    assert command.name == "python3"
    assert command.stdin == UNKNOWN


def test_conditions_and_loops_are_named() -> None:
    commands = read('if grep -q x f; then for f in $(find .); do sed -i s/a/b/ "$f"; done; fi\n')
    assert commands[-1].inside == ("if", "for")
    assert commands[-1].words[-1] == UNKNOWN


def test_cd_changes_the_folder_of_later_commands() -> None:
    assert read("cd /a/site-packages\ngit apply x.patch\n")[-1].folder == "/a/site-packages"


def test_exports_are_values() -> None:
    (command,) = read('export VLLM_A=1 VLLM_B="$(date)"\n')
    assert command.exports == (("VLLM_A", "1"), ("VLLM_B", UNKNOWN))


def test_a_script_that_is_cut_off_is_read_as_far_as_it_goes() -> None:
    assert read("sed -i s/a/b/ f\nif true; then\n")[0].name == "sed"
