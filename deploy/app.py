"""The application in the image that Dockerfile builds: one task. Put yours in its place."""

from tallybook import App

app = App("shop")


@app.task(queue="mail")
async def send_welcome(user_id: int, *, lang: str = "en") -> None:
    print(f"welcome, user {user_id} ({lang})")
