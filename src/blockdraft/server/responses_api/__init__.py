"""POST /v1/responses, OpenAI's Responses API, on top of chats.

* schema: what requests look like.
* convert: a request as a ChatRequest.
* write: the pieces of the answer as a response, or as its events.
* reply: the route's answer, put together from these.
"""
