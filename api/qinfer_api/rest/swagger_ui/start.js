// The addresses are relative, so that the page works behind a proxy's path; without `validatorUrl` set to null, Swagger UI
// would have a server of its makers read the document.
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#operations",
  deepLinking: true,
  docExpansion: "none",
  validatorUrl: null,
  // Replies have null for NaN, which the browser could not read.
  requestInterceptor: (request) => {
    if (request.headers.accept) request.headers.accept += ";strict=true";
    return request;
  },
});
