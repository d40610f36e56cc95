"""POST /v1/messages, Anthropic's Messages API, on top of chats.

* schema: what requests look like.
* convert: a request as a ChatRequest.
* write: the pieces of the answer as a message, or as its events.
* reply: the route's answer, put together from these; and the counting of tokens.
"""
