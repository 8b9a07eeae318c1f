{{- define "leyline.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains "leyline" .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-leyline" .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "leyline.selector" -}}
app.kubernetes.io/name: leyline
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "leyline.labels" -}}
{{ include "leyline.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "leyline.image" -}}
{{- $name := .image.repository -}}
{{- with .root.Values.images.registry -}}{{- $name = printf "%s/%s" . $name -}}{{- end -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $name .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (.image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- define "leyline.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "leyline.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{/* Of every container: no root, no writable image, no capability. */}}
{{- define "leyline.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "leyline.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* An engine's resources: without a volume, its models lie on the node's disk. */}}
{{- define "leyline.engineResources" -}}
{{- $resources := deepCopy .resources -}}
{{- if not .persistence.enabled -}}
{{- $_ := set $resources "requests" (merge (dict "ephemeral-storage" .persistence.size) ($resources.requests | default dict)) -}}
{{- $_ := set $resources "limits" (omit ($resources.limits | default dict) "ephemeral-storage") -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* The engines by name, as the setting upstreams. */}}
{{- define "leyline.upstreams" -}}
{{- $found := dict -}}
{{- $service := printf "%s-engine" (include "leyline.fullname" .) -}}
{{- if .Values.engine.enabled -}}
{{- range $index := until (int .Values.engine.replicas) -}}
{{- $url := printf "http://%s-%d.%s.%s.svc.%s:30000" $service $index $service $.Release.Namespace $.Values.clusterDomain -}}
{{- $_ := set $found (printf "engine-%d" $index) (dict "url" $url) -}}
{{- end -}}
{{- end -}}
{{- range $name, $item := .Values.upstreams -}}
{{- if hasKey $found $name -}}{{- fail (printf "upstreams.%s: the chart's own engine has that name" $name) -}}{{- end -}}
{{- $_ := set $found $name $item -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}

{{/* By which names the proxy is called, for while there are no keys; addresses go without saying. */}}
{{- define "leyline.hosts" -}}
{{- $name := include "leyline.fullname" . -}}
{{- $found := list -}}
{{- range $service := ternary (list $name (printf "%s-admin" $name)) (list $name) (not (empty .Values.proxy.admin.existingSecret)) -}}
{{- $local := printf "%s.%s" $service $.Release.Namespace -}}
{{- $found = concat $found (list $service $local (printf "%s.svc" $local) (printf "%s.svc.%s" $local $.Values.clusterDomain)) -}}
{{- end -}}
{{- if .Values.ingress.enabled -}}{{- $found = append $found .Values.ingress.host -}}{{- end -}}
{{- if .Values.httpRoute.enabled -}}{{- $found = concat $found .Values.httpRoute.hostnames -}}{{- end -}}
{{- toJson (concat $found (.Values.proxy.settings.allowed_hosts | default list) | uniq) -}}
{{- end -}}

{{/* The scheme of the proxy's ports. */}}
{{- define "leyline.scheme" -}}
{{- ternary "https" "http" (or (not (empty .Values.proxy.tls.existingSecret)) (hasKey .Values.proxy.settings "tls_cert")) -}}
{{- end -}}

{{/* The file of --config. */}}
{{- define "leyline.settings" -}}
{{- $own := dict
    "shutdown_delay_s" .Values.proxy.shutdown.delaySeconds
    "shutdown_grace_s" .Values.proxy.shutdown.graceSeconds -}}
{{- if .Values.embedded.enabled -}}
{{- with .Values.embedded.model -}}{{- $_ := set $own "model" . -}}{{- end -}}
{{- else -}}
{{- $_ := set $own "upstreams" (include "leyline.upstreams" . | fromYaml) -}}
{{- end -}}
{{- if .Values.proxy.policies -}}{{- $_ := set $own "policies_file" "/etc/leyline/policies/policies.yaml" -}}{{- end -}}
{{- if .Values.proxy.apiKeys.existingSecret -}}
{{- $_ := set $own "api_keys_file" "/etc/leyline/keys/api-keys" -}}
{{- else -}}
{{- $_ := set $own "allowed_hosts" (include "leyline.hosts" . | fromJsonArray) -}}
{{- end -}}
{{- if .Values.redis.caKey -}}{{- $_ := set $own "redis_ca_file" "/etc/leyline/redis/ca.crt" -}}{{- end -}}
{{- if .Values.proxy.tracing.endpoint -}}{{- $_ := set $own "trace" "otlp" -}}{{- end -}}
{{- with .Values.proxy.tls -}}
{{- if .existingSecret -}}
{{- $_ := set $own "tls_cert" "/etc/leyline/tls/tls.crt" -}}
{{- $_ := set $own "tls_key" "/etc/leyline/tls/tls.key" -}}
{{- if .clientCaKey -}}
{{- $_ := set $own "tls_client_ca" "/etc/leyline/tls/clients.crt" -}}
{{- $_ := set $own "tls_clients" "optional" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with .Values.upstreamTls -}}
{{- if .existingSecret -}}
{{- $_ := set $own "upstream_tls_ca" "/etc/leyline/upstream-tls/ca.crt" -}}
{{- if .showsOwn -}}
{{- $_ := set $own "upstream_tls_cert" "/etc/leyline/upstream-tls/tls.crt" -}}
{{- $_ := set $own "upstream_tls_key" "/etc/leyline/upstream-tls/tls.key" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with .Values.proxy.admin -}}
{{- if .existingSecret -}}
{{- $_ := set $own "admin_port" 8791 -}}
{{- $_ := set $own "admin_host" "0.0.0.0" -}}
{{- if .metricsOnly -}}{{- $_ := set $own "metrics_on_admin" true -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml (merge $own .Values.proxy.settings) -}}
{{- end -}}

{{/* What no schema can say in words that help. */}}
{{- define "leyline.check" -}}
{{- $several := or (gt (int .Values.proxy.replicas) 1) (and .Values.proxy.autoscaling.enabled (gt (int .Values.proxy.autoscaling.maxReplicas) 1)) -}}
{{- if .Values.embedded.enabled -}}
{{- if or .Values.engine.enabled .Values.upstreams -}}{{- fail "embedded.enabled runs an engine in the proxy: set engine.enabled=false and leave upstreams empty" -}}{{- end -}}
{{- if $several -}}{{- fail "embedded.enabled takes one proxy: each has an engine of its own, and sessions stay with one engine" -}}{{- end -}}
{{- else if not (or (and .Values.engine.enabled (gt (int .Values.engine.replicas) 0)) .Values.upstreams) -}}
{{- fail "no engine: set engine.enabled=true, name some in upstreams, or try embedded.enabled=true" -}}
{{- end -}}
{{- if and $several (not .Values.redis.existingSecret) -}}
{{- fail "several proxies share their sessions in Redis: set redis.existingSecret, or proxy.replicas=1 without autoscaling" -}}
{{- end -}}
{{- if and .Values.proxy.autoscaling.enabled (gt (int .Values.proxy.autoscaling.minReplicas) (int .Values.proxy.autoscaling.maxReplicas)) -}}
{{- fail "proxy.autoscaling: minReplicas is more than maxReplicas" -}}
{{- end -}}
{{- if and .Values.proxy.admin.metricsOnly (not .Values.proxy.admin.existingSecret) -}}
{{- fail "proxy.admin.metricsOnly needs proxy.admin.existingSecret" -}}
{{- end -}}
{{- if and .Values.proxy.policies .Values.proxy.settings.policy -}}
{{- fail "give policies in proxy.policies or as proxy.settings.policy, not both" -}}
{{- end -}}
{{- if and .Values.proxy.tls.clientCaKey (not .Values.proxy.tls.existingSecret) -}}
{{- fail "proxy.tls.clientCaKey needs proxy.tls.existingSecret" -}}
{{- end -}}
{{- if eq (.Values.proxy.settings.tls_clients | default "") "required" -}}
{{- fail "proxy.settings.tls_clients=required would end Kubernetes's own probes, which show no certificate: take optional, and no API keys" -}}
{{- end -}}
{{- if and .Values.redis.caKey (not .Values.redis.existingSecret) -}}
{{- fail "redis.caKey needs redis.existingSecret" -}}
{{- end -}}
{{- end -}}

{{/* OpenTelemetry's own variables, where a collector is named. */}}
{{- define "leyline.tracing" -}}
{{- if .endpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ .endpoint | quote }}}
- {name: OTEL_TRACES_SAMPLER, value: parentbased_traceidratio}
- {name: OTEL_TRACES_SAMPLER_ARG, value: {{ .sampleRatio | quote }}}
- name: K8S_POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: K8S_NAMESPACE_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: OTEL_RESOURCE_ATTRIBUTES
  value: service.instance.id=$(K8S_POD_NAME),k8s.pod.name=$(K8S_POD_NAME),k8s.namespace.name=$(K8S_NAMESPACE_NAME)
{{- include "leyline.secretVariable" (dict "name" "OTEL_EXPORTER_OTLP_HEADERS" "from" .headers) }}
{{- end }}
{{- end -}}

{{/* The port of a URL. */}}
{{- define "leyline.port" -}}
{{- $url := urlParse . -}}
{{- regexFind ":[0-9]+$" $url.host | trimPrefix ":" | default (ternary "443" "80" (eq $url.scheme "https")) -}}
{{- end -}}

{{/* A variable from a secret, where one is named. */}}
{{- define "leyline.secretVariable" -}}
{{- if .from.existingSecret }}
- name: {{ .name }}
  valueFrom:
    secretKeyRef: {name: {{ .from.existingSecret }}, key: {{ .key | default .from.key }}}
{{- end }}
{{- end -}}
