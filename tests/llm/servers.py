"""Servers with the protocols of vLLM, SGLang and TGI that answer with a model of a few thousand weights. They reject
the same requests as the real servers, according to the sources of vLLM 0.32, SGLang 0.5.23 and TGI 3.3."""

from __future__ import annotations

import contextlib
import copy
import json
import socket
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import torch
import toy
from safetensors.torch import load_file

from rlox.llm.models.language import LanguageModel
from rlox.llm.sampling import Settings, sample


class Refused(Exception):
    def __init__(self, status, content):
        super().__init__(status)
        self.status, self.content = status, content


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._answer("GET", None)

    def do_POST(self):
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._answer("POST", json.loads(data) if data else None)

    def _answer(self, method, body):
        fake = self.server.fake
        try:
            content = fake.asked(method, self.path, body, self.headers)
            status = 200
        except Refused as e:
            status, content = e.status, e.content
        if content is fake.SILENT:  # until the client disconnects
            self.connection.recv(1)
            self.close_connection = True
            return
        data = content if isinstance(content, bytes) else b"" if content is None else json.dumps(content).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data) + fake.broken_off))
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            self.close_connection = True
        if fake.broken_off:
            self.close_connection = True


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, fake, port):
        self.fake, self.open = fake, []
        super().__init__(("127.0.0.1", port), _Handler)

    def server_bind(self):
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.server_address[:2]

    def process_request(self, request, client_address):
        self.open.append(request)
        super().process_request(request, client_address)

    def handle_error(self, *_):
        pass


class Fake:
    """A server with a copy of `module`.

    `before(method, path, body)` may raise `Refused` or return an answer; `mangle(answer)` changes completions.
    """

    SILENT = object()
    posts = ()

    def __init__(self, module, token=None, context=64, mangle=None, before=None, stale=()):
        self.start_weights = module
        self.token, self.context, self.mangle, self.before, self.stale = token, context, mangle, before, stale
        self.broken_off = 0  # bytes that are missing from answers
        self.seen, self.n_loads, self._lock = [], 0, threading.Lock()
        self._load(copy.deepcopy(module))
        self.listener, self.port = None, 0
        self.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        """Listen, with the initial weights of the server."""
        self._load(copy.deepcopy(self.start_weights))
        self.reset()
        self.listener = _Listener(self, self.port)
        self.port = self.listener.server_port
        threading.Thread(target=self.listener.serve_forever, args=(0.005,), daemon=True).start()

    def reset(self):
        pass

    def kill(self):
        """As after SIGKILL: stop listening and drop all connections."""
        if self.listener is None:
            return
        listener, self.listener = self.listener, None
        listener.shutdown()
        listener.socket.close()
        for connection in listener.open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    def _load(self, module):
        self.model = LanguageModel(module, None, toy.EOS)

    def load(self, folder):
        """Load the weights in `folder`, except those that stay stale."""
        found = load_file(Path(folder) / "model.safetensors")
        assert (Path(folder) / "config.json").exists()
        made = copy.deepcopy(self.model.module)
        assert found.keys() == made.state_dict().keys()
        kept = {name: x for name, x in found.items() if not any(part in name for part in self.stale)}
        made.load_state_dict(kept, strict=False)
        self._load(made)
        self.n_loads += 1

    def asked(self, method, path, body, headers):
        self.seen.append((method, path, body))
        if self.before is not None and (content := self.before(method, path, body)) is not None:
            return content
        if self.token is not None and self.guarded(path) and headers.get("Authorization") != f"Bearer {self.token}":
            raise Refused(401, {"error": "Unauthorized"})
        name = "get_" if method == "GET" else "post_"
        function = getattr(self, name + path.strip("/").replace("/", "_"), None)
        if function is None:
            raise Refused(405, {"detail": "Method Not Allowed"}) if path in self.posts else self.unknown(path)
        with self._lock:
            return function() if body is None else function(body)

    def guarded(self, path):
        return True

    def unknown(self, path):
        return Refused(404, {"detail": "Not Found"})

    def draw(self, prompt, n, settings, seed):
        """Completions of one prompt, their log-probabilities at the temperature, and whether they ended."""
        found = sample(self.model, [np.array(prompt)], settings, n=n, seed=seed)
        rows = [ids.tolist() for ids in found.ids]
        log_probs = self.log_probs(prompt, rows, settings.temperature or 1.0)
        return [*zip(rows, log_probs, found.ended.tolist(), strict=True)]

    @torch.no_grad()
    def log_probs(self, prompt, completions, temperature=1.0):
        """Log-probabilities of the tokens of `completions`; padding on the right has no effect on them."""
        longest = max(map(len, completions))
        ids = torch.tensor([[*prompt, *row, *[0] * (longest - len(row))] for row in completions])
        logits = self.model.module(ids).logits[:, len(prompt) - 1 : -1].double() / temperature
        found = logits.log_softmax(-1).gather(-1, ids[:, len(prompt) :, None])[..., 0]
        return [row[: len(own)].tolist() for row, own in zip(found, completions, strict=True)]

    def log_probs_of(self, ids):
        """Log-probabilities of all tokens except the first."""
        return self.log_probs(ids[:1], [ids[1:]])[0] if len(ids) > 1 else []


def require(holds, status, content):
    if not holds:
        raise Refused(status, content)


class VLLM(Fake):
    """`dev`: started with VLLM_SERVER_DEV_MODE=1. Unknown fields are ignored, as in vLLM."""

    posts = ("/v1/completions",)

    def __init__(self, module, dev=True, names=("toy",), raw=False, lora=False, **more):
        self.names, self.dev, self.raw, self.lora = names, dev, raw, lora
        if dev:
            self.posts += ("/pause", "/resume", "/collective_rpc", "/reset_prefix_cache")
        if lora:
            self.posts += ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
        super().__init__(module, **more)

    def reset(self):
        self.paused, self.cached, self.adapters = False, None, {}

    def guarded(self, path):
        return path.startswith("/v1")

    def asked(self, method, path, body, headers):
        if path not in self.posts and method == "POST":
            raise Refused(404, {"detail": "Not Found"})
        return super().asked(method, path, body, headers)

    def get_health(self):
        return None

    def get_v1_models(self):
        own = [{"id": name, "object": "model", "parent": None, "max_model_len": self.context} for name in self.names]
        return {"object": "list", "data": [*own, {"id": "other-adapter", "parent": self.names[0]}]}

    def post_pause(self):
        self.paused = True
        return {"status": "paused"}

    def post_resume(self):
        self.paused = False
        return {"status": "resumed"}

    def post_reset_prefix_cache(self):
        self.cached = None

    def post_collective_rpc(self, body):
        require(isinstance(body.get("method"), str), 400, {"error": "Missing 'method' in request body"})
        require(body["method"] == "reload_weights" and self.paused, 500, {"error": {"message": "engine error"}})
        before = self.model
        try:
            self.load(body["kwargs"]["weights_path"])
        except OSError as e:
            raise Refused(500, {"error": {"message": str(e), "code": 500}}) from e
        self.cached = before  # cached prefixes are still answered with the old weights
        return {"results": [None]}

    def post_v1_load_lora_adapter(self, body):
        name, path = body.get("lora_name"), body.get("lora_path")
        require(name and path, 400, _error("Both 'lora_name' and 'lora_path' must be provided."))
        require(name not in self.adapters, 400, _error(f"The lora adapter '{name}' has already been loaded."))
        self.adapters[name] = path
        self.n_loads += 1
        return b"Success: LoRA adapter added successfully."

    def post_v1_unload_lora_adapter(self, body):
        name = body["lora_name"]
        require(name in self.adapters, 404, _error(f"The lora adapter '{name}' cannot be found.", 404))
        del self.adapters[name]
        return b"Success: LoRA adapter removed successfully."

    def _adapted(self, name):
        """The adapter's files are read on demand; without them the engine dies."""
        from peft import PeftModel

        path = self.adapters[name]
        require((Path(path) / "adapter_config.json").exists(), 500, _error("EngineCore encountered an issue.", 500))
        return LanguageModel(PeftModel.from_pretrained(copy.deepcopy(self.start_weights), path), None, toy.EOS)

    def post_v1_completions(self, body):
        names = [*self.names, *self.adapters]
        name = body.get("model")
        require(name in names, 404, _error(f"The model `{name}` does not exist.", 404))
        prompts = body.get("prompt")
        require(isinstance(prompts, list) and prompts, 400, _error("prompt"))
        prompts = prompts if isinstance(prompts[0], list) else [prompts]
        n, most = body.get("n", 1), body.get("max_tokens", 16)
        require(isinstance(n, int) and n >= 1 and most >= 1, 400, _error("n and max_tokens must be at least 1"))
        for prompt in prompts:
            require(prompt and all(0 <= i < toy.VOCABULARY for i in prompt), 400, _error("out of vocabulary"))
            text = f"This model's maximum context length is {self.context} tokens."
            require(len(prompt) + most <= self.context, 400, _error(text))
        temperature, top_p, top_k = body.get("temperature", 1.0), body.get("top_p", 1.0), body.get("top_k", 0)
        require(temperature >= 0 and 0 < top_p <= 1 and top_k >= -1, 400, _error("sampling parameters"))
        require(not self.paused, 500, _error("paused", 500))
        own, model = self.model, self._adapted(name) if name in self.adapters else self.cached or self.model
        self.model = model
        try:
            choices = [choice for prompt in prompts for choice in self._choices(body, prompt, n, most, len(prompts))]
        finally:
            self.model = own
        for index, choice in enumerate(choices):
            choice["index"] = index
        answer = {"id": "cmpl-1", "object": "text_completion", "model": name, "choices": choices}
        return answer if self.mangle is None else self.mangle(answer)

    def _choices(self, body, prompt, n, most, n_prompts):
        settings = Settings(
            most, float(body.get("temperature", 1.0)), max(body.get("top_k", 0), 0), float(body.get("top_p", 1.0)),
            float(body.get("min_p", 0.0)), tuple(body.get("stop_token_ids") or ()),
        )  # fmt: skip
        for ids, log_probs, ended in self.draw(prompt, n, settings, body.get("seed") or 0):
            if self.raw:
                (log_probs,) = self.log_probs(prompt, [ids])
            elif settings.top_k == 1:
                log_probs = [0.0] * len(ids)
            choice = {"text": "", "finish_reason": "stop" if ended else "length", "logprobs": None}
            if body.get("logprobs") is not None:
                tokens = [f"token_id:{i}" for i in ids]
                choice["logprobs"] = {"tokens": tokens, "token_logprobs": log_probs, "top_logprobs": None}
            if body.get("return_token_ids"):
                choice |= {"token_ids": ids, "prompt_token_ids": prompt}
            if body.get("prompt_logprobs") is not None:
                pairs = zip(prompt[1:], self.log_probs_of(prompt), strict=True)
                entries = [{str(i): {"logprob": x, "rank": 1, "decoded_token": ""}} for i, x in pairs]
                choice["prompt_logprobs"] = [None, *entries]
            yield choice


def _error(message, code=400):
    return {"error": {"message": message, "type": "BadRequestError", "param": None, "code": code}}


class SGLang(Fake):
    posts = ("/generate", "/update_weights_from_disk")
    PARAMETERS = ("n", "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop_token_ids", "stop")

    def reset(self):
        self.version, self.drawn = "default", Counter()

    def get_health(self):
        return None

    def get_v1_models(self):
        return {"object": "list", "data": [{"id": "toy", "max_model_len": self.context}]}

    def post_update_weights_from_disk(self, body):
        try:
            self.load(body["model_path"])
        except OSError as e:
            raise Refused(400, {"success": False, "message": str(e)}) from e
        self.version = body.get("weight_version") or self.version
        return {"success": True, "message": "Succeeded to update model weights."}

    def post_generate(self, body):
        ids, asked = body.get("input_ids"), body.get("sampling_params") or {}
        content = {"error": {"message": "Either text, input_ids or input_embeds should be provided."}}
        require((ids is None) != (body.get("text") is None), 400, content)
        require(ids is not None and ids, 400, {"error": {"message": "this one takes ids"}})
        unknown = set(asked) - set(self.PARAMETERS)
        text = f"SamplingParams.__init__() got an unexpected keyword argument {unknown}"
        require(not unknown, 400, {"error": {"message": text}})
        n, most, top_k = asked.get("n", 1), asked.get("max_new_tokens", 128), asked.get("top_k", -1)
        fits = asked.get("temperature", 1.0) >= 0 and 0 < asked.get("top_p", 1.0) <= 1 and (top_k == -1 or top_k >= 1)
        require(fits and 0 <= asked.get("min_p", 0.0) <= 1, 400, {"error": {"message": "sampling parameters"}})
        text = f"Requested token count exceeds the model's maximum context length of {self.context} tokens."
        require(len(ids) + most <= self.context, 400, {"error": {"message": text}})
        settings = Settings(
            most, float(asked.get("temperature", 1.0)), max(top_k, 0), float(asked.get("top_p", 1.0)),
            float(asked.get("min_p", 0.0)), tuple(asked.get("stop_token_ids") or ()),
        )  # fmt: skip
        answers = []
        # There is no seed: the server has its own random numbers, which here do not depend on the order of requests.
        self.drawn[tuple(ids)] += 1
        for drawn, log_probs, ended in self.draw(ids, n, settings, 1000 * self.drawn[tuple(ids)] + sum(ids)):
            reason = {"type": "stop", "matched": drawn[-1]} if ended else {"type": "length", "length": len(drawn)}
            meta = {"prompt_tokens": len(ids), "finish_reason": reason, "weight_version": self.version}
            if body.get("return_logprob"):
                meta["output_token_logprobs"] = [[x, i, None] for x, i in zip(log_probs, drawn, strict=True)]
                start = body.get("logprob_start_len", -1)
                pairs = zip([None, *self.log_probs_of(ids)], ids, strict=True)
                meta["input_token_logprobs"] = [[x, i, None] for x, i in pairs] if start == 0 else []
            answers.append({"text": "", "output_ids": drawn, "meta_info": meta})
        answer = answers if n > 1 else answers[0]
        return answer if self.mangle is None else self.mangle(answer)


class TGI(Fake):
    """Unknown parameters are ignored, as in TGI. `prefix`: ids that its tokenizer puts before every text."""

    posts = ("/generate",)

    def __init__(self, module, prefix=(), **more):
        self.prefix = [*prefix]
        super().__init__(module, **more)

    def get_health(self):
        return None

    def get_info(self):
        return {"model_id": "toy", "max_total_tokens": self.context, "max_best_of": 2}

    def post_generate(self, body):
        def valid(holds, content):
            require(holds, 422, {"error": f"Input validation error: {content}", "error_type": "validation"})

        text, asked = body.get("inputs"), body.get("parameters") or {}
        require(isinstance(text, str), 422, {"error": "inputs: invalid type, expected a string", "error_type": "json"})
        best_of = asked.get("best_of") or 1
        sampling = asked.get("do_sample") or any(
            asked.get(name) is not None for name in ("temperature", "top_k", "top_p")
        )
        valid(best_of == 1 or sampling, "you must use sampling when `best_of` is > 1")
        valid(best_of <= 2, "`best_of` must be > 0 and <= 2")
        valid(best_of == 1 or asked.get("seed") is None, "`seed` must not be set when `best_of` > 1")
        temperature, top_p, top_k = asked.get("temperature"), asked.get("top_p"), asked.get("top_k")
        valid(temperature is None or temperature > 0, "`temperature` must be strictly positive")
        valid(top_p is None or 0 < top_p < 1, "`top_p` must be > 0.0 and < 1.0")
        valid(top_k is None or top_k > 0, "`top_k` must be strictly positive")
        most = asked.get("max_new_tokens")
        valid(most is not None and most > 0, "`max_new_tokens` must be strictly positive")
        valid(text, "`inputs` cannot be empty")
        stop = asked.get("stop") or []
        valid(len(stop) <= 4, "`stop` supports up to 4 stop sequences")
        ids = [*self.prefix, *toy.tokenizer()(text)["input_ids"]]
        content = f"`inputs` tokens + `max_new_tokens` must be <= {self.context}"
        valid(len(ids) + most <= self.context, content)
        stops = tuple(toy.tokenizer()(s)["input_ids"][0] for s in stop)
        heat = (1.0 if temperature is None else temperature) if sampling else 0.0
        settings = Settings(most, float(heat), top_k or 0, 1.0 if top_p is None else top_p, 0.0, stops)
        ((drawn, log_probs, ended),) = self.draw(ids, 1, settings, asked.get("seed") or 0)
        answer = {"generated_text": toy.tokenizer().decode(drawn, skip_special_tokens=True)}
        if asked.get("details"):
            reason = ("eos_token" if drawn[-1] == toy.EOS else "stop_sequence") if ended else "length"
            pairs = zip(
                [None, *self.log_probs_of(ids)] if asked.get("decoder_input_details") else [], ids, strict=False
            )
            answer["details"] = {
                "finish_reason": reason,
                "seed": asked.get("seed"),
                "prefill": [{"id": i, "text": "", "logprob": x} for x, i in pairs],
                "tokens": [
                    {"id": i, "text": "", "logprob": x, "special": i == toy.EOS}
                    for i, x in zip(drawn, log_probs, strict=True)
                ],
            }
        return answer if self.mangle is None else self.mangle(answer)
