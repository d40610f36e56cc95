"""The HTTP door. A request over HTTP takes the way of docs/tour.md, with stations around it.

1. `headers.py` gives it an id. `guard.py` is what it passes next: whether a web page may ask
   (`address.py`), the key, the size of its body, whether the server is about to end. `app.py` has
   the routes; `protocol.py` says what a request looks like, `extras.py` what becomes of fields
   beyond that, and `errors.py` what is answered if it looks different. `responses_api` and
   `messages_api` make chats of the requests of other interfaces.
2. `shape.py` makes a grammar of formats and `tools`, with room for thinking before it;
   `conversation.py` makes turns for the chat template, and `prompts.py` token ids. `params.py`
   makes `SamplingParams` of all that: the one place that translates. `service.py` first takes
   places in the queue; then `preparing.py` has the prompt tokenized and the grammar compiled in
   threads (`workers.py`), in bounded time.
3. `engine/async_engine.py` takes it in. One thread owns the engine and steps it; between two steps
   it drops the samples whose clients have left, fills free places from the queue
   (`engine/fair_queue.py` says whose turn it is), and hands out chunks. `engine/samples.py` runs
   samples and their text for `LLM` and for this thread alike.
4. `pieces.py` makes pieces of the chunks: thinking apart from content (`reasoning.py`), calls apart
   from text (`calls.py`), the prompt in front if it is to be echoed. A stream sends each piece
   (`responses.py` watches whether anybody still listens), a whole answer is their sum; `render.py`
   writes both as JSON.
5. `describe.py` says in /openapi.json what answers look like. `metrics.py` is told of every step
   (`measure/step_report.py`) and of every end. `run.py` binds, serves and drains.
6. `web.py` serves the page at `/`. It asks for the rounds of its streams: `engine/samples.py` keeps
   what each pass drafted beside the text, until `text/detokenizer.py` says that all of it is final.
"""
