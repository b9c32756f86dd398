"""The command line and the settings behind it."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf import json_format

from cluster.core.errors import ConfigurationError
from cluster.ingress.openai.parse import parse
from cluster.ingress.openai.requests import ChatRequest
from deploy import settings, terminal
from deploy.commands.serve import usage_examples
from deploy.distillation.command import _TerminalNotices
from deploy.placement import Resources
from pilotfish.v1 import generation_pb2
from tests.support.models import tiny
from tests.support.terminal import run_command


class TestSettings:
    def test_the_cpu_preset_is_the_default(self) -> None:
        found = settings.load_settings(environment={})

        assert found.configuration.target.path == "smollm2-135m-instruct"
        assert found.configuration.target.device == "cpu"
        assert found.ray_address is None

    @pytest.mark.parametrize("preset", settings.presets())
    def test_every_preset_is_a_valid_configuration(self, preset: str) -> None:
        settings.load_settings(preset, environment={})

    def test_an_assignment_is_yaml_and_overrides_the_file(self, tmp_path: Path) -> None:
        file = tmp_path / "mine.yaml"
        file.write_text("target: {dtype: bfloat16, tensor_parallel: 3}\n")

        target = settings.load_settings(
            str(file), ["target.tensor_parallel=1", "target.served_name=null"], {}
        ).configuration.target

        assert (target.dtype, target.tensor_parallel, target.served_name) == ("bfloat16", 1, None)

    def test_the_environment_names_the_file_and_the_cache(self, tmp_path: Path) -> None:
        environment = {"PILOTFISH_CONFIG": "gpu", "PILOTFISH_CACHE_DIR": str(tmp_path), "PILOTFISH_RAY_ADDRESS": "auto"}

        found = settings.load_settings(environment=environment)

        assert found.configuration.target.dtype == "bfloat16"
        assert found.cache_directory == tmp_path
        assert found.ray_address == "auto"

    def test_a_named_file_overrides_the_environment(self) -> None:
        found = settings.load_settings("cpu", environment={"PILOTFISH_CONFIG": "gpu"})

        assert found.configuration.target.tensor_parallel == 1

    def test_an_empty_file_takes_every_default(self, tmp_path: Path) -> None:
        file = tmp_path / "empty.yaml"
        file.write_text("")

        assert settings.load_settings(str(file), environment={}).configuration.scheduler.max_sequences == 32

    def test_the_arguments_of_serve_run_are_settings(self) -> None:
        arguments = {"config": "cpu", "target.dtype": "bfloat16", "draft": {"max_nodes": "3"}}

        configuration = settings.settings_from_arguments(arguments, {}).configuration

        assert configuration.target.dtype == "bfloat16"
        assert (configuration.draft.max_nodes, configuration.draft.max_depth) == (3, 7)

    def test_a_string_of_a_file_stays_a_string(self) -> None:
        given = {"target": {"revision": "0123456", "served_name": "70"}, "server": {"grpc_host": "::"}}

        configuration = settings.settings_from_arguments(given, {}).configuration

        assert (configuration.target.revision, configuration.target.served_name) == ("0123456", "70")
        assert configuration.server.grpc_host == "::"

    @pytest.mark.parametrize(
        ("config", "assignment", "words"),
        [
            ("absent.yaml", None, "absent.yaml: needed a readable file or a preset (cpu, gpu)"),
            ("a\0b", None, "a\0b: needed a readable file or a preset (cpu, gpu); embedded null byte"),
            ("cpu", "target.dtype", "--set target.dtype: needed key=value"),
            ("cpu", "=3", "needed key=value"),
            ("cpu", "target.dtyp=float32", "target.dtyp: unknown key; the nearest valid one is target.dtype"),
            ("cpu", "target.dtype=float8", "target.dtype: 'float8' is refused"),
            ("cpu", "target.path=[", "--set target.path: not YAML"),
            ("cpu", "target.served_name=2024-13-01", "--set target.served_name: refused; month must be in 1..12"),
            ("cpu", f"target.threads={'9' * 5000}", "--set target.threads: refused; "),
            ("cpu", f"target.aliases={'[' * 5000}", "--set target.aliases: refused; a value is not of its tag's kind"),
            ("cpu", "target.kv={block_size: 8, block_size: 16}", "--set target.kv: refused; line 1: block_size is"),
        ],
    )
    def test_a_mistake_is_reported_with_its_key(self, config: str, assignment: str | None, words: str) -> None:
        with pytest.raises(ConfigurationError) as refused:
            settings.load_settings(config, [] if assignment is None else [assignment], {})

        assert words in str(refused.value)

    def test_a_file_without_sections_is_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "list.yaml"
        file.write_text("- 1\n")

        with pytest.raises(ConfigurationError, match="needed sections with keys, found list"):
            settings.load_settings(str(file), environment={})

    @pytest.mark.parametrize(("text", "key"), [("1: 2", "1"), ("target: {}\non: 2", "True"), ("~: 2", "None")])
    def test_a_key_of_a_file_that_is_not_a_text_is_named(self, tmp_path: Path, text: str, key: str) -> None:
        """YAML reads `on` as true."""
        file = tmp_path / "mine.yaml"
        file.write_text(text)

        with pytest.raises(ConfigurationError, match=rf"mine\.yaml: {key} is refused; keys must be strings"):
            settings.load_settings(str(file), environment={})

    def test_a_section_that_a_file_has_twice_is_refused(self, tmp_path: Path) -> None:
        """YAML itself would forget the first one."""
        file = tmp_path / "mine.yaml"
        file.write_text("target:\n  dtype: bfloat16\ndraft:\n  method: none\ntarget:\n  threads: 2\n")

        with pytest.raises(ConfigurationError, match=r"mine\.yaml: refused; line 5: target is there twice"):
            settings.load_settings(str(file), environment={})

    def test_anchors_and_merged_sections_of_yaml_are_read(self, tmp_path: Path) -> None:
        file = tmp_path / "mine.yaml"
        merged = "draft: {model: {kv: {<<: *kv, window: 64, block_size: 32}}}"
        file.write_text(f"target: {{kv: &kv {{block_size: 8}}}}\n{merged}\n")

        found = settings.load_settings(str(file), environment={}).configuration

        assert (found.target.kv.block_size, found.draft.model_dump()["model"]["kv"]["block_size"]) == (8, 32)

    def test_a_section_may_merge_several_others(self, tmp_path: Path) -> None:
        file = tmp_path / "mine.yaml"
        file.write_text("target: {kv: &kv {block_size: 8}}\ndraft: {model: {kv: {<<: *kv, <<: {window: 64}}}}\n")

        kv = settings.load_settings(str(file), environment={}).configuration.draft.model_dump()["model"]["kv"]

        assert (kv["block_size"], kv["window"]) == (8, 64)

    def test_keys_of_several_types_are_not_the_same(self, tmp_path: Path) -> None:
        file = tmp_path / "mine.yaml"
        file.write_text("- {1: number, '1': text}\n")

        assert settings.read_list(file) == [{1: "number", "1": "text"}]

    @pytest.mark.parametrize("read", [settings.read_list, lambda file: settings.read_values(str(file))])
    def test_a_file_of_an_unknown_user_is_refused(self, read: Callable[[Path], object]) -> None:
        with pytest.raises(ConfigurationError, match=r"~no\.body/mine\.yaml: needed a"):
            read(Path("~no.body/mine.yaml"))


class TestCommands:
    def test_a_command_does_not_import_the_others(self) -> None:
        code = (
            "import sys; from deploy.cli import command_line; command_line(['serve', '--help']); "
            "print(*(name for name in sys.modules if name.startswith(('deploy.commands.', 'ray', 'torch'))))"
        )

        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

        assert set(ended.stdout.split()) == {"deploy.commands.serve", "deploy.commands.options"}

    def test_help_lists_all_commands(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run_command("--help") == 0

        printed = capsys.readouterr().out
        assert all(name in printed for name in ("serve", "demo", "run-batch", "bench", "simulate"))

    @pytest.mark.parametrize("command", ["drafter", "run-batch"])
    def test_a_paragraph_of_help_is_broken_at_the_width_of_the_terminal_alone(
        self, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "600")
        assert run_command(command, "--help") == 0

        text = capsys.readouterr().out.partition("Options")[0]
        assert [line.strip()[-1] for line in text.splitlines() if line.strip(" ╭─")] == ["]", ".", "."]

    def test_the_version_is_printed(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run_command("--version") == 0
        assert capsys.readouterr().out.startswith("pilotfish ")

    def test_a_plan_shows_every_rank(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        tiny.save(tmp_path, tiny.llama(num_attention_heads=6, num_key_value_heads=3))
        arguments = ("--set", f"target.path={tmp_path}", "--set", "target.tensor_parallel=3")

        assert run_command("plan", "--config", "cpu", *arguments) == 0

        shown = capsys.readouterr().out
        assert all(f"rank {rank} of 3" in shown for rank in range(3))
        assert "127.0.0.1:9000" in shown

    def test_a_plan_shows_what_the_machine_lacks(self, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = ("--set", "target.device=cuda", "--set", "target.tensor_parallel=64")

        assert run_command("plan", *arguments) == 1
        assert "would not start: GPUs: needed 64" in capsys.readouterr().out

    def test_a_plan_refuses_a_directory_without_a_model(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        assert run_command("plan", "--set", f"target.path={tmp_path}") == 1
        assert "a model directory with config.json and .safetensors files" in capsys.readouterr().out

    @pytest.mark.parametrize("name", ["my models/one", "models/one.", "a/b--c"])
    def test_a_plan_refuses_what_is_neither_a_directory_nor_a_name_of_the_hub(
        self, capsys: pytest.CaptureFixture[str], name: str
    ) -> None:
        assert run_command("plan", "--set", f"target.path={name}") == 1
        assert "give a directory, a .gguf file, owner/name or one of" in capsys.readouterr().out

    def test_a_path_that_the_system_refuses_is_one_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run_command("plan", "--set", f"target.path={'a' * 300}") == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("pilotfish: [Errno 36] File name too long: 'aaa")

    @pytest.mark.parametrize(
        ("arguments", "status", "words"),
        [
            (("--config", "~nobody-here/mine.yaml"), 2, "--config ~nobody-here/mine.yaml: needed a readable file"),
            (("--set", "target.path=~nobody-here/model"), 1, "model path '~nobody-here/model': no such directory"),
            (("--set", "draft.path=~nobody-here/draft"), 1, "draft '~nobody-here/draft': no such directory"),
        ],
    )
    def test_the_home_of_a_user_that_there_is_not_is_no_directory(
        self, capsys: pytest.CaptureFixture[str], arguments: tuple[str, str], status: int, words: str
    ) -> None:
        assert run_command("prepare", *arguments) == status
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"pilotfish: {words}")

    def test_the_preset_for_gpus_starts_on_one_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        node = Resources(cpus=8, gpus=1, memory_bytes=1 << 36, gpu_memory_bytes=24 << 30)
        monkeypatch.setattr("deploy.machine.local_resources", lambda: node)

        assert run_command("plan", "--config", "gpu") == 0
        assert run_command("plan", "--config", "gpu", "--set", "target.tensor_parallel=2") == 1

    @pytest.mark.parametrize(("method", "gpus"), [("model", 5), ("ngram", 4), ("none", 4)])
    def test_only_a_method_that_loads_a_model_claims_a_gpu(
        self, method: str, gpus: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        node = Resources(cpus=64, gpus=8, memory_bytes=1 << 40, gpu_memory_bytes=1 << 37)
        monkeypatch.setattr("deploy.machine.local_resources", lambda: node)

        settings = ("target.tensor_parallel=4", "draft.model.path=Qwen/Qwen3-0.6B", f"draft.method={method}")
        assignments = [part for setting in settings for part in ("--set", setting)]
        assert run_command("plan", "--config", "gpu", *assignments) == 0

        printed = capsys.readouterr().out
        assert printed.count("cuda") == gpus
        assert ("Qwen3-0.6B" in "".join(printed.split())) == (method == "model")

    @pytest.mark.parametrize("command", ["plan", "serve", "demo", "prepare"])
    def test_a_bad_setting_is_one_line_and_exit_code_2(self, capsys: pytest.CaptureFixture[str], command: str) -> None:
        assert run_command(command, "--set", "server.http_prot=1") == 2

        shown = capsys.readouterr().err
        assert shown == "pilotfish: server.http_prot: unknown key; the nearest valid one is server.http_port\n"

    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            ("pilotfish be", {"bench"}),
            ("pilotfish bench ", {"race", "serve"}),
            ("pilotfish serve --config ", {"cpu", "gpu"}),
            ("pilotfish plan --set target.tens", {"target.tensor_parallel="}),
            ("pilotfish bench serve --endpoint co", {"completions"}),
            ("pilotfish plan --set draft.method=n", {"draft.method=ngram", "draft.method=none"}),
            ("pilotfish plan --set server.page=", {"server.page=on", "server.page=off"}),
            ("pilotfish plan --set server.log_format=j", {"server.log_format=json"}),
            (
                "pilotfish plan --set target.standby=",
                {"target.standby=auto", "target.standby=true", "target.standby=false"},
            ),
        ],
    )
    def test_a_shell_completes_commands_options_and_their_values(
        self, line: str, expected: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("_PILOTFISH_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        assert run_command() == 0
        assert set(capsys.readouterr().out.split()) >= expected

    @pytest.mark.parametrize(
        ("words", "expected"),
        [
            (["plan", "--set", "draft.method", "=", "n"], {"ngram", "none"}),
            (["plan", "--set", "server.page", "="], {"on", "off"}),
            (["plan", "--set", "target.threads", "=", "2", "--set", "server.log_format", "=", "j"], {"json"}),
            (["plan", "--set", "target.threads", "=", "2", "--set", "target.tensor_p"], {"target.tensor_parallel="}),
            (["plan", "--set", "=", "server.page", "=", "o"], {"on", "off"}),
        ],
    )
    def test_bash_splits_settings_at_the_sign_and_completes_what_follows_it(
        self,
        words: list[str],
        expected: set[str],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setenv("_PILOTFISH_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", "\n".join(["pilotfish", *words]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        assert run_command() == 0
        assert set(capsys.readouterr().out.split()) == expected

    def test_the_script_of_the_completion_is_printed(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
        assert run_command("--show-completion", "bash") == 0
        assert "_PILOTFISH_COMPLETE=complete_bash" in capsys.readouterr().out

    def test_an_unknown_command_is_exit_code_2(self) -> None:
        assert run_command("unknown") == 2

    def test_a_server_and_this_process_cannot_both_answer(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run_command("generate", "hello", "--url", "http://localhost:8000", "--in-process") == 2
        assert "needed one of them, found both" in capsys.readouterr().err

    def test_libraries_show_no_bars_of_their_own(self) -> None:
        """Some, such as the one for GGUF files of `transformers`, know no setting for it."""
        code = (
            "import sys\nfrom deploy.cli import main\nsys.argv = ['pilotfish', '--version']\n"
            "try:\n    main()\nexcept SystemExit:\n    from tqdm.auto import tqdm\n    list(tqdm(range(3)))"
        )
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert ended.stdout.startswith("pilotfish ") and ended.stderr == ""

    def test_what_is_printed_keeps_the_names_of_pictures(self, capsys: pytest.CaptureFixture[str]) -> None:
        terminal.output.print('{"text": ":smile:"}', markup=False)
        terminal.notify("draft.path: :fish:")
        shown = capsys.readouterr()
        assert (shown.out, shown.err) == ('{"text": ":smile:"}\n', "draft.path: :fish:\n")

    def test_a_character_that_the_encoding_of_the_output_lacks_is_printed_as_its_code(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shown = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii", write_through=True))

        assert run_command("plan", "--node", "cpus=8", "--set", "target.path=/mod\u00e8le") == 0

        assert rb"/mod\xe8le" in shown.getvalue()

    def test_json_is_escaped_where_the_encoding_of_the_output_lacks_a_character(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shown = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii", write_through=True))

        assert run_command("plan", "--json", "--node", "cpus=8", "--set", "target.path=/mod\u00e8le") == 0

        assert "/mod\u00e8le" in json.dumps(json.loads(shown.getvalue()), ensure_ascii=False)

    def test_a_notice_of_a_distillation_keeps_its_brackets(self, capsys: pytest.CaptureFixture[str]) -> None:
        _TerminalNotices().print("/models/[new]: agrees")
        assert capsys.readouterr().err == "/models/[new]: agrees\n"

    def test_a_missing_model_is_exit_code_1(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run_command("prepare", "--set", "target.path=./nowhere") == 1
        assert "no such directory" in capsys.readouterr().err

    def test_a_cache_that_cannot_be_written_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "cache").touch()
        monkeypatch.setenv("PILOTFISH_CACHE_DIR", str(tmp_path / "cache"))
        assert run_command("prepare") == 1
        (line,) = capsys.readouterr().err.splitlines()
        directory = tmp_path / "cache" / "smollm2-135m-instruct"
        assert line.startswith(f"pilotfish: {directory}: the converted model cannot be stored;")
        assert line.endswith("set PILOTFISH_CACHE_DIR to a directory with room that this user may write")

    def test_the_three_usage_examples_are_well_formed_and_name_the_model_and_both_addresses(self) -> None:
        configuration = settings.load_settings(
            "cpu", ["server.http_port=8123", "server.grpc_port=9123"], {}
        ).configuration

        ready, curl, python, grpcurl = usage_examples(configuration).strip().split("\n\n")

        assert ready.startswith("smollm2-135m-instruct is ready at http://127.0.0.1:8123 (HTTP) and 127.0.0.1:9123")
        command, url, *_, body = shlex.split(curl)
        assert (command, url) == ("curl", "http://127.0.0.1:8123/v1/chat/completions")
        assert parse(ChatRequest, body.encode()).model == "smollm2-135m-instruct"
        compile(shlex.split(python)[-1], "snippet", "exec")
        *_, message, address, method = shlex.split(grpcurl)
        assert (address, method) == ("127.0.0.1:9123", "pilotfish.v1.GenerationService/Generate")
        request = json_format.Parse(message, generation_pb2.GenerateRequest())
        assert request.chat.messages[0].role == "user"

    def test_the_examples_present_a_key_where_one_is_demanded(self) -> None:
        configuration = settings.load_settings("cpu", (), {}).configuration

        assert "PILOTFISH_API_KEY" not in usage_examples(configuration)
        _, curl, python, grpcurl = usage_examples(configuration, demands_keys=True).strip().split("\n\n")

        for command in (curl, grpcurl):
            words = shlex.split(command)
            assert words[words.index("-H") + 1] == "Authorization: Bearer $PILOTFISH_API_KEY"
        snippet = shlex.split(python)[-1]
        compile(snippet, "snippet", "exec")
        assert 'api_key=os.environ["PILOTFISH_API_KEY"]' in snippet


class TestPreflight:
    """What `pilotfish serve` finds before Ray starts: exit code 2 and one line for each problem."""

    @pytest.mark.parametrize(
        ("assignment", "words"),
        [
            ("server.api_key_file=absent.keys", "server.api_key_file: needed a readable file or directory, found"),
            ("server.api_key_file=empty.keys", "server.api_key_file: needed at least one API key, found none"),
            ("server.http_port=1", "server.http_port"),
            ("server.tls={certificate: absent.pem, key: absent.pem}", "server.tls.certificate: needed a readable file"),
            ("cluster.tls={certificate: absent.pem, key: a, ca: b}", "cluster.tls.certificate: needed a readable file"),
        ],
    )
    def test_files_and_ports_are_checked_first(
        self,
        assignment: str,
        words: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "empty.keys").touch()
        monkeypatch.setattr("deploy.preflight._why_unbindable", lambda _, port: "address in use" if port == 1 else None)
        assert run_command("serve", "--set", assignment) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"pilotfish: {words}")

    @pytest.mark.parametrize("below", ["", "/models"])
    def test_a_cache_directory_that_is_a_file_is_named(
        self, below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "cache").touch()
        monkeypatch.setenv("PILOTFISH_CACHE_DIR", f"{tmp_path}/cache{below}")
        assert run_command("serve", "--set", "server.http_port=0", "--set", "server.grpc_port=0") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("pilotfish: PILOTFISH_CACHE_DIR: needed the directory")
        assert line.endswith(f"found the file {tmp_path}/cache; set PILOTFISH_CACHE_DIR to another directory")

    @pytest.mark.parametrize("variable", ["PILOTFISH_CACHE_DIR", "PILOTFISH_CODE_DIR"])
    def test_a_directory_of_an_unknown_user_is_named(
        self, variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv(variable, "~no.body/cache")
        assert run_command("doctor") == 2
        assert capsys.readouterr().err == f"pilotfish: {variable}: needed a known user, found ~no.body/cache\n"
